"""``lightning-shard convert``: a checkpoint in another format."""

from lightning_shard_cli.checkpoints import Parser, mistakes_in_one_line


def run(arguments: list[str]) -> None:
    """Convert a checkpoint.

    Args:
        arguments: Those of the command, the subcommand first.

    Raises:
        CommandError: If they are wrong, or the checkpoint cannot be read or written.

    """
    parser = Parser(
        prog="lightning-shard convert",
        description="Write a checkpoint of any kind in another format, with little memory.",
    )
    parser.add_argument("source", metavar="SRC", help="a checkpoint: folder or file")
    parser.add_argument("target", metavar="DST", help="what to write; it appears when it is whole")
    parser.add_argument(
        "--to",
        choices=["lightning", "safetensors", "portable"],
        help="lightning: one plain file; safetensors: one file of weights; portable: the folder that loads under every"
        " strategy. By default by the name of DST: .ckpt, .pt, .pth; .safetensors; all else",
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="convert floating-point weights")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="read what is no plain data too, which can run any code of the checkpoint's",
    )
    given = parser.parse_args(arguments[1:])
    with mistakes_in_one_line():
        from lightning_shard.checkpoint.convert import convert
        from lightning_shard.checkpoint.inspect import size_in_words
        from lightning_shard.checkpoint.places import LocalPlace

        written = convert(
            given.source,
            given.target,
            to=given.to,
            weights_only=given.weights_only,
            dtype=given.dtype,
            trusted=given.trusted,
        )
        place = LocalPlace(written)
        size = sum(place.size(name) for name in place.names()) if place.is_folder() else place.size()
        print(f"{written}: {size_in_words(size)}")

"""``lightning-shard plan``: what every strategy costs, before the run."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from lightning_shard_cli.checkpoints import Parser, mistakes_in_one_line
from lightning_shard_cli.errors import CommandError

if TYPE_CHECKING:
    from lightning_shard.plan.hardware import Device
    from lightning_shard.plan.results import Plan

NOTHING_FITS = 3
"""Exit code where a device or its memory was given, and no strategy is known to fit."""

EPILOG = """\
examples:
  lightning-shard plan --params 7e9 --devices 8 --device h100        model states and traffic of every strategy
  lightning-shard plan --params 13B --devices 16 --memory 80GB --precision bf16-true --optimizer sgd-momentum
  lightning-shard plan --stages 4 --microbatches 8                   bubble and timeline of every pipeline schedule
  lightning-shard plan --config run.yaml --devices 8 --device h100   your own module, data, optimizer and precision
  lightning-shard plan --config run.yaml --devices 8 --device h100 --model.layers=48

exit codes: 0; 2 for a mistake; 3 if a device or its memory was given and nothing is known to fit
"""

_ONLY = {
    "params": ("precision", "optimizer", "frozen", "accumulate_grad_batches"),
    "config": ("simulate",),
}
"""Options that go with one source of the model only."""


def run(arguments: list[str]) -> None:
    """Print a plan.

    Args:
        arguments: Those of the command, the subcommand first.

    Raises:
        CommandError: If they are wrong or contradict each other.
        SystemExit: With :data:`NOTHING_FITS` if nothing fits; the plan is printed all the same.

    """
    parser = _parser()
    given, rest = parser.parse_known_args(arguments[1:])
    if rest and not given.config:
        _refuse_unknown(parser, rest)
    _check(given)
    with _only_json_on_stdout(given.json), mistakes_in_one_line():
        from lightning_shard.plan.report import table, to_json, write_html

        plan = _plan(given, rest)
        if given.html is not None:
            write_html(plan, given.html)
    try:
        print(json.dumps(to_json(plan), indent=1, allow_nan=False) if given.json else table(plan), flush=True)
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    if plan.strategies and _has_memory(plan) and not any(each.fits for each in plan.strategies):
        raise SystemExit(NOTHING_FITS)


def _parser() -> Parser:
    parser = Parser(
        prog="lightning-shard plan",
        description="Say what every strategy costs before the run: memory, traffic, and a pipeline's bubble.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model, one of")
    model.add_argument("--params", metavar="N", type=_count, help="a number of parameters: 7e9, 7B, 125M")
    model.add_argument(
        "--config",
        "-c",
        metavar="YAML",
        action="append",
        help="a configuration that `lightning-shard fit` takes; options such as --model.layers=48 are added to it",
    )
    where = parser.add_argument_group("the machines")
    where.add_argument("--devices", metavar="N", type=_whole, help="ranks on all nodes together")
    where.add_argument("--nodes", metavar="N", type=_whole, default=1, help="machines that they are in (default: 1)")
    where.add_argument("--device", metavar="NAME", help="what a rank runs on: h100, a100-40gb, ...; see docs/plan.md")
    where.add_argument("--hardware", metavar="YAML", help="a file with more devices for --device")
    where.add_argument(
        "--memory", metavar="SIZE", help="memory of a device (80GB, 80GiB), in place of what --device has"
    )
    training = parser.add_argument_group("training, with --params (a configuration says it itself)")
    training.add_argument("--precision", help="as in Trainer(precision=...) (default: bf16-mixed)")
    training.add_argument("--optimizer", help="adam, adamw, sgd, sgd-momentum, ... (default: adam)")
    training.add_argument("--frozen", metavar="N", type=_count, help="how many of the parameters are not trained")
    training.add_argument("--accumulate-grad-batches", metavar="N", type=_whole, help="as in the Trainer (default: 1)")
    pipeline = parser.add_argument_group("pipelines")
    pipeline.add_argument("--stages", metavar="N", type=_whole, help="ranks in a pipeline")
    pipeline.add_argument("--microbatches", metavar="N", type=_whole, help="microbatches in a batch")
    pipeline.add_argument(
        "--stages-per-rank",
        metavar="N",
        type=_whole,
        help="stages on a rank, where the schedule does not fix it (default: 2)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--simulate", metavar="N", type=_whole, help="with --config: how many finalists to simulate (default: 3)"
    )
    output.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    output.add_argument("--html", metavar="FILE", help="write a page with charts, too")
    return parser


def _count(text: str) -> float:
    """A number of parameters as people write it."""
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    factor = factors.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if factor > 1 else text)
        # In decimals, 6.738415616 * 1e9 is not whole.
        return float(round(number * factor)) if factor > 1 else number
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: write 7e9, 7B or 125M") from None


def _whole(text: str) -> int:
    """A whole number, also as 1e3; bounds are the planner's to check."""
    try:
        number = float(text)
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number")


def _refuse_unknown(parser: Parser, rest: list[str]) -> None:
    from lightning_shard_cli.errors import nearest

    name = rest[0].partition("=")[0]
    if not name.startswith("--"):
        raise CommandError(f"{rest[0]!r} belongs to no option (see {parser.prog} --help)")
    if "." in name:
        raise CommandError(f"{name} is an option of a configuration: give that with --config")
    known = [option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"]
    raise CommandError(f"no option {name}{nearest(name[2:], known, prefix='--')} (see {parser.prog} --help)")


def _check(given: argparse.Namespace) -> None:
    """Refuse options that are missing, or that contradict each other."""
    sources = [f"--{name}" for name in ("params", "config") if getattr(given, name) is not None]
    if len(sources) == 2:
        raise CommandError("--params and --config each say how large the model is: give one of them")
    for source, names in _ONLY.items():
        for name in names:
            if getattr(given, name) is not None and f"--{source}" not in sources:
                option = "--" + name.replace("_", "-")
                why = "; the configuration says it itself" if source == "params" and given.config else ""
                override = f" (change it with --trainer.{name}=...)" if why and name != "optimizer" else ""
                raise CommandError(f"{option} goes with --{source}{why}{override if name != 'frozen' else ''}")
    if not sources:
        if given.stages is None and given.microbatches is None:
            raise CommandError(
                "what shall be planned? --params 7e9 --devices 8, or --config run.yaml --devices 8 --device h100, or"
                " --stages 4 --microbatches 8"
            )
        for name in ("devices", "device", "memory", "hardware"):
            if getattr(given, name) is not None:
                raise CommandError(f"--{name} goes with --params or --config; schedules alone do not depend on it")
    elif given.devices is None:
        raise CommandError(f"--devices is missing: on how many ranks shall {sources[0]} be planned?")
    if given.stages is not None and given.microbatches is None and given.params is None:
        raise CommandError("--microbatches is missing: bubbles depend on it")
    if given.microbatches is not None and given.stages is None and given.params is None:
        raise CommandError("--stages is missing: bubbles depend on it")
    if given.stages_per_rank is not None and given.microbatches is None:
        raise CommandError("--stages-per-rank goes with --microbatches")
    if given.hardware is not None and given.device is None:
        raise CommandError("--hardware describes devices: name one of them with --device")
    if given.config and given.device is None:
        raise CommandError("--device is missing: times depend on it; --device h100, or your own with --hardware")


def _plan(given: argparse.Namespace, rest: list[str]) -> "Plan":
    from lightning_shard.plan.estimate import plan_parameters, plan_pipeline

    if given.params is None and not given.config:
        return plan_pipeline(
            given.stages, given.microbatches, 2 if given.stages_per_rank is None else given.stages_per_rank
        )
    chip = _device(given)
    if given.config:
        from lightning_shard_cli.plan_config import plan_config

        return plan_config(given, chip, rest)
    optional = {name: getattr(given, name) for name in (*_ONLY["params"], "stages_per_rank")}
    return plan_parameters(
        given.params,
        devices=given.devices,
        nodes=given.nodes,
        device=chip,
        memory_bytes=given.memory,
        stages=given.stages,
        microbatches=given.microbatches,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _device(given: argparse.Namespace) -> "Device | None":
    from lightning_shard.plan.hardware import DEVICES, find_device, read_devices

    if given.device is None:
        return None
    return find_device(given.device, DEVICES | (read_devices(given.hardware) if given.hardware else {}))


def _has_memory(plan: "Plan") -> bool:
    return plan.memory_bytes is not None or plan.device is not None


@contextmanager
def _only_json_on_stdout(wanted: bool) -> Iterator[None]:
    """Send what the user's own code, and processes that it starts, print meanwhile to standard error."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

"""What kind of checkpoint lies at a path, and what is none."""

from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.checkpoint.format import MANIFEST, METADATA
from lightning_shard.checkpoint.places import Place

SHARDED_METADATA = "meta.pt"
"""Lightning's part in the folders that its FSDPStrategy and ModelParallelStrategy write."""

ENGINE = "checkpoint"
"""The folder in which Lightning's DeepSpeedStrategy, and ours in the engine's format, keep the engine's files."""

Kind = Literal["portable", "file", "sharded", "engine"]


def kind_of(place: Place) -> Kind:
    """What kind of checkpoint lies at a place.

    Raises:
        FileNotFoundError: If there is none: nothing, a part of one, or one that was not written to its end.

    """
    if not place.exists():
        aside = place.replaced()
        hint = f" The one that stood there was put aside as {aside}: give that path instead." if aside else ""
        raise FileNotFoundError(f"There is no checkpoint at {place}.{hint}{_inside(place)}")
    if not place.is_folder():
        if inside := _inside(place):
            raise FileNotFoundError(f"{place} is no checkpoint.{inside}")
        return "file"
    if place.exists(MANIFEST):
        return "portable"
    if place.exists(SHARDED_METADATA) and place.exists(METADATA):
        return "sharded"
    if place.exists(ENGINE) or place.exists("latest"):
        return "engine"
    names = place.names()
    found = "is empty" if not names else f"holds {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
    if place.exists(METADATA) or any(name.startswith(("data-", "__0_")) for name in names):
        found += f", but not the {MANIFEST} (or {SHARDED_METADATA}) that is written last: it was not written to its end"
    raise FileNotFoundError(f"{place} is no checkpoint: the folder {found}.{_inside(place)}")


def _inside(place: Place) -> str:
    outer = place
    for _ in range(2):
        outer = outer.parent()
        if any(outer.exists(name) for name in (MANIFEST, SHARDED_METADATA)) or (
            outer.exists(ENGINE) and outer.exists("latest")
        ):
            return f" It lies inside the checkpoint {outer}: give that path instead."
    return ""


def refuse_safetensors(place: Place) -> None:
    """Say so if a file is a safetensors file: it holds weights alone, and no checkpoint of Lightning's.

    Raises:
        MisconfigurationException: If its name says so.

    """
    if str(place).endswith(".safetensors"):
        raise MisconfigurationException(
            f"{place} is a safetensors file: weights alone, and no checkpoint of Lightning's. Load it into a module"
            " with `safetensors.torch.load_model`."
        )


def check_can_be_replaced(place: Place) -> None:
    """Refuse to overwrite what is no checkpoint.

    Raises:
        MisconfigurationException: Naming the path.

    """
    if not place.exists() or (place.is_folder() and not place.names()):
        return
    if place.is_folder():
        try:
            kind_of(place)
            return
        except FileNotFoundError:
            what = "a folder"
    else:
        with place.open() as file:
            if file.read(2) in (b"PK", b"\x80\x02"):  # as torch.save writes, now and formerly
                return
        what = "a file"
    raise MisconfigurationException(
        f"{place} is {what} that is no checkpoint, and is not overwritten. Give the name of the checkpoint itself, such"
        " as a new name inside it."
    )

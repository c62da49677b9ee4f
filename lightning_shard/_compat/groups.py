"""Private API behind a moment in which this process acts as if it had no process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The tables of process groups, which otherwise only `destroy_process_group` empties, and that shuts the groups down.
from torch.distributed import distributed_c10d as c10d


@contextmanager
def groups_hidden() -> Iterator[None]:
    """Inside, torch knows of no process group; afterwards of all those that it knew before.

    For work that one rank does while the others wait for it: what asks whether there are other ranks is told no, and
    does not wait for them. A child that is forked inside may make groups of its own. It must end by ``os._exit``: the
    groups of its parent, which it has inherited, would wait at their end for threads that a fork does not take along.
    """
    if not c10d.is_initialized():
        yield
        return
    world = c10d._world
    tables: tuple[Any, ...] = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    )
    default, count = world.default_pg, world.group_count
    kept = [dict(table) for table in tables]
    names = dict(world.pg_names)
    c10d._update_default_pg(None)
    for table in tables:
        table.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0
    try:
        yield
    finally:
        for table, entries in zip(tables, kept, strict=True):
            table.clear()
            table.update(entries)
        c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
        for group, name in names.items():
            c10d._register_process_group(name, group)  # type: ignore[attr-defined]
        world.group_count = count
        c10d._update_default_pg(default)

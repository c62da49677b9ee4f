"""Pipeline parallelism: the user's own step, traced once and replayed on every stage."""

"""The strategies: Lightning's hooks, each a call into a room of the package."""

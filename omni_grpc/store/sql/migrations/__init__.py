"""The migrations, one file each: docs/store.md says how to add one."""

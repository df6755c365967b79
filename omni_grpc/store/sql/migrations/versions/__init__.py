"""In their order: v0001 makes the tables, v0002 that of webhooks, v0003 says which trace each of these belongs to,
v0004 makes that of adapters that were loaded.
"""

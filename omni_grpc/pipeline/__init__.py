"""The model contract: prepare, predict, advance, decode, and what happens between them for every model alike."""

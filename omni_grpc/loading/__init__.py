"""From files to modules: our own modules weight by weight, and the components that transformers and diffusers bring."""

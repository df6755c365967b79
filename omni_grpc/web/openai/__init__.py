"""OpenAI's endpoints for images, videos and sound, for its official clients. Translators: the gate decides."""

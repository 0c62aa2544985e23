"""Where an engine's stages come from: one protocol, and its sources but that of plans."""

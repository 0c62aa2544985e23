"""The engine: what is made once, and what runs in every step."""

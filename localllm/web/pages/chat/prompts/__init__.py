"""The library of prompts."""

"""Markdown and maths of a model as safe HTML; knows no chat."""

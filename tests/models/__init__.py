"""Small models with everything that a pipeline partition has to cope with: `cases` lists them."""

from models.zoo import Case, cases, model_names

__all__ = ["Case", "cases", "model_names"]

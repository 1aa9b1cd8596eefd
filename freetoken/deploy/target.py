"""What a word on the command line means: a recipe by name or path, a model folder, a card's name, a repository."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.recipe.load import LoadedRecipe


def load_target(target: str, *, sets: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe that `target` names, or one made for the model that it names.

    Raises UsageError, with the nearest name, where it is neither.
    """
    from freetoken.recipe.load import load_recipe, make_model_recipe
    from freetoken.recipe.lookup import SUFFIXES, find_named_recipe

    if target.endswith(SUFFIXES) or find_named_recipe(target) is not None:
        return load_recipe(target, sets=sets)
    folder = Path(target).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"{target} is a folder without a `config.json`, so no model", hint="`ft recipe list`")
        return make_model_recipe(target, sets=sets)
    if folder.is_file():
        raise UsageError(f"{target} is neither a recipe (`.yaml`) nor the folder of a model")
    if target.count("/") == 1 or find_card_name(target) is not None:
        return make_model_recipe(target, sets=sets)
    raise UsageError(_describe_unknown(target), hint="`ft recipe list` and `ft model list` show what has a name")


def find_card_name(name: str) -> str | None:
    """The card that answers to `name`, or None."""
    from freetoken.checkpoint.cards import find_card_info

    info = find_card_info(name)
    return info.name if info is not None else None


def _describe_unknown(target: str) -> str:
    from freetoken.checkpoint.cards import suggest_cards
    from freetoken.recipe.load import list_recipes

    known = [*(name for name, _ in list_recipes()), *suggest_cards(target)]
    close = difflib.get_close_matches(target.lower(), known, n=1, cutoff=0.5) or list(suggest_cards(target, 1))
    guess = f"; did you mean `{close[0]}`?" if close else ""
    return f"no recipe, model card or folder `{target}`{guess}"

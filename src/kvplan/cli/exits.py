"""Exit statuses, and how an error becomes one. Commands share this; nothing is printed to standard output here.

0: yes, it can be done. 1: no, the two engines cannot exchange cache. 2: the input is wrong.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from kvplan.errors import CompatibilityError, KVPlanError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

OK, CANNOT, BAD_INPUT = 0, 1, 2


@contextmanager
def exits() -> Iterator[None]:
    """Turn errors into one message on standard error and the exit status that fits."""
    try:
        yield
    except CompatibilityError as error:
        for item in error.mismatches:
            typer.echo(f"cannot exchange cache: {item.field}: source {item.ours}, destination {item.theirs}", err=True)
            if item.advice:
                typer.echo(f"  {item.advice}", err=True)
        raise typer.Exit(CANNOT) from None
    except PlanError as error:
        typer.echo(f"cannot exchange cache: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except KVPlanError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None

"""Every error that ppleffects raises: what went wrong, where in the user's code, and what to write instead."""

from __future__ import annotations


class PPLError(Exception):
    """The root of all errors raised by ppleffects.

    Args:
        problem: one sentence that says what is wrong.
        site: full name of the site, where there is one.
        source: ``file.py:line`` in the user's code.
        expected: what the library needs.
        found: what it was given.
        fix: what to write instead.
    """

    def __init__(
        self,
        problem: str,
        *,
        site: str | None = None,
        source: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ):
        self.problem, self.site, self.source = problem, site, source
        where = [] if site is None else [f"site '{site}'"]
        where += [] if source is None else [f"at {source}"]
        head = f"{' '.join(where)}: {problem}" if where else problem
        rows = [("expected", expected), ("found", found), ("fix", fix)]
        super().__init__("\n".join([head, *(f"  {key}: {text}" for key, text in rows if text is not None)]))


class UnhandledEffectError(PPLError, RuntimeError):
    """An effect primitive ran outside of any interpretation."""


class UnsupportedPrimitiveError(PPLError, NotImplementedError):
    """An effect stands inside an equation that no handler can look into."""


class ContextStructureError(PPLError, TypeError):
    """A context changed its structure where control flow needs it to stay the same."""


class DuplicateSiteError(PPLError, ValueError):
    """Two sites of one model have the same name."""


class ValuesError(PPLError, ValueError):
    """The values given to a model do not name exactly its latent sites."""


class ShapeError(PPLError, ValueError):
    """A value does not have the shape of its site."""


class DTypeError(PPLError, TypeError):
    """A value cannot be cast to the dtype of its site without loss."""


class DistributionError(PPLError, TypeError):
    """An object given as a distribution is none, or is no pytree."""


class SpecError(PPLError, ValueError):
    """How a site lies on a mesh is not known, or contradicts its types."""


class MeshError(PPLError, ValueError):
    """A mesh, an axis of it, or the rows to be laid over it do not fit."""


class DiscreteLatentError(PPLError, TypeError):
    """A latent without a density over the reals was given to a gradient-based sampler."""


class NoValidStartError(PPLError, ValueError):
    """No starting point with a finite density and gradient was found."""


class MissingDependencyError(PPLError, ImportError):
    """An optional library is needed and not installed."""


class SettingsError(PPLError, ValueError):
    """A setting of an inference run is out of its range, or names nothing that exists."""


class CheckpointError(PPLError, RuntimeError):
    """A checkpoint cannot be written or read, or belongs to another run; what it holds stays as it is."""


class DistributedError(PPLError, RuntimeError):
    """The processes of a run do not come together."""


class LayoutWarning(UserWarning):
    """A run is laid out otherwise than it was asked for: the same draws, for more time."""


class DiagnosticsWarning(UserWarning):
    """An inference run ended, and its draws should not be trusted as they are."""

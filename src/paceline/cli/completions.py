"""Completions on the terminal, with tokens coloured by their origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.types import Completion, Provenance

STYLES = {
    Provenance.SAMPLED: "",
    Provenance.ACCEPTED: "bold green",
    Provenance.CORRECTED: "yellow",
    Provenance.BONUS: "cyan",
}
LEGEND = {"accepted draft": Provenance.ACCEPTED, "corrected": Provenance.CORRECTED, "bonus": Provenance.BONUS}


class CompletionPrinter:
    def __init__(self, console: Console, tokenizer: Any) -> None:
        from paceline.model.text import Pieces

        self.console, self._pieces = console, Pieces(tokenizer)

    @property
    def has_colours(self) -> bool:
        return self.console.is_terminal and not self.console.no_color

    def stream(self) -> CompletionStream:
        return CompletionStream(self)

    def text(self, token_ids: Sequence[int], provenance: Sequence[int], start: int, end: int) -> Text:
        """The tokens from `start` to `end`."""
        found = Text()
        pieces = self._pieces(token_ids)
        for piece, origin in zip(pieces[start:end], provenance[start:end], strict=True):
            found.append(piece, STYLES[Provenance(origin)])
        return found

    def num_complete(self, token_ids: Sequence[int]) -> int:
        """Tokens whose text is known: not those of a character that has further tokens."""
        pieces = self._pieces(token_ids)
        num = len(pieces)
        if pieces and pieces[-1].endswith("\ufffd"):
            num -= 1
            while num and not pieces[num - 1]:
                num -= 1
        return num

    def show(self, completion: Completion) -> None:
        self.stream().finish(completion)

    def show_legend(self, completions: Sequence[Completion]) -> None:
        """Without colours there is nothing to explain."""
        if self.has_colours and any(c.num_drafts for c in completions):
            named = [Text(name, STYLES[origin]) for name, origin in LEGEND.items()]
            self.console.print(Text("tokens: ") + Text(" · ").join([*named, Text("sampled without a draft")]))


class CompletionStream:
    """Prints one completion while it grows."""

    def __init__(self, printer: CompletionPrinter) -> None:
        self._printer, self._num_shown = printer, 0

    def update(self, token_ids: Sequence[int], provenance: Sequence[int]) -> None:
        self._print(token_ids, provenance, self._printer.num_complete(token_ids))

    def finish(self, completion: Completion) -> None:
        token_ids = completion.token_ids.tolist()
        self._print(token_ids, completion.provenance.tolist(), len(token_ids))
        self._printer.console.print(
            Text(f"  [{completion.finish_reason}, {len(token_ids)} tokens]\n", "dim"), soft_wrap=True
        )

    def _print(self, token_ids: Sequence[int], provenance: Sequence[int], end: int) -> None:
        if end > self._num_shown:
            text = self._printer.text(token_ids, provenance, self._num_shown, end)
            self._printer.console.print(text, end="", soft_wrap=True)
            self._num_shown = end

"""What a voice is given to read."""

from __future__ import annotations

import pytest

from stage_worker.engines.speech_text import speakable


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Plain text, as it is.", "Plain text, as it is."),
        ("It costs $9.99 at 7:30 pm, on the 3rd.", "It costs $9.99 at 7:30 pm, on the 3rd."),
        ("**Bold** and *it* and ***both*** and `code`.", "Bold and it and both and code."),
        ("__Bold__ and _it_, not snake_case.", "Bold and it, not snake case."),
        ("# Title\n\n- one\n* two\n> quoted", "Title one two quoted"),
        ("1. First\n2. Second", "1. First 2. Second"),
        ("See [the docs](https://example.com/a_b) now.", "See the docs now."),
        ("Go to https://www.example.com/a/b?c=d, or not.", "Go to example dot com, or not."),
        ("It is at http://example.org.", "It is at example dot org."),
        ("```python\nprint(1)\n```\nDone.", "print(1) Done."),
        ("Fish &amp; chips <br/> for 2 < 3.", "Fish & chips for 2 3."),
        ("Well done! 🎉👍🏽", "Well done!"),
        ("a | b\n---|---\n1 | 2", "a b 1 2"),
        ("It’s ‘fine’ – really…", "It's 'fine' - really…"),
        ("Say [hibari](/hˈɑɹi/) now.", "Say hibari now."),
        ("Null\x00 and \u200bzero width", "Null and zero width"),
        ("***", ""),
        ("...", ""),
        ("🎉", ""),
        (" \n\t", ""),
        ("", ""),
        ("2*3*4", "2 3 4"),
        ("Call 12345678901234 now, 1234567.", "Call 1 2 3 4 5 6 7 8 9 0 1 2 3 4 now, 1234567."),
    ],
)
def test_speakable(written: str, said: str) -> None:
    assert speakable(written) == said


def test_long_odd_input_is_quick() -> None:
    # Every pattern is linear: no input makes them backtrack without end.
    for text in ("*" * 50_000, "[" * 50_000, "<a" * 30_000, "_a" * 30_000, "https://" * 5_000, " \n" * 50_000):
        speakable(text)

"""Forms: read in pieces of any size, within bounds, and what is wrong with them named."""

from __future__ import annotations

import pytest

from gateway.http import multipart
from gateway.http.multipart import Form, FormReader, form_values
from omnicore.errors import InvalidRequestError

BOUNDARY = b"----frontier"


def body(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    found = b""
    for disposition, data in parts:
        found += b"--%b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % (BOUNDARY, disposition.encode(), data)
    return found + b"--" + BOUNDARY + end


def read(data: bytes, step: int = 1 << 20) -> Form:
    reader = FormReader(BOUNDARY)
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
    return reader.finish()


def refused(data: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read(data)
    return caught.value


WHOLE = body(
    ('form-data; name="prompt"', "Nacht.\r\n--猫\n🙂".encode()),
    ('form-data; name="image[]"; filename="a \\"b\\".png"', b"\x89PNG\r\n\r\n--" + BOUNDARY[:-1]),
    ('form-data; name="image[]"; filename=""', b""),
    ('form-data; name="n"', b"2"),
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1 << 20])
def test_pieces_of_any_size(step: int) -> None:
    form = read(WHOLE, step)
    assert form.texts == {"prompt": ["Nacht.\r\n--猫\n🙂"], "n": ["2"]}
    assert [(upload.name, upload.filename, upload.data) for upload in form.files] == [
        ("image", 'a "b".png', b"\x89PNG\r\n\r\n--" + BOUNDARY[:-1]),
        ("image", "", b""),
    ]


def test_what_is_no_form() -> None:
    for data in (
        b"",
        b"{}",
        WHOLE[:-10],
        body(("form-data", b"x")),
        body(('attachment; name="x"', b"x")),
        body(('form-data; name=""', b"x")),
        body(('form-data; name="' + "x" * 300 + '"', b"x")),
        b"--" + BOUNDARY + b"\r\nno colon\r\n\r\nx\r\n--" + BOUNDARY + b"--\r\n",
    ):
        error = refused(data)
        assert error.reason == "INVALID_MULTIPART"
        assert error.violations[0].field == "body"
    with pytest.raises(InvalidRequestError):
        FormReader(b"x" * 300)


def test_bounds() -> None:
    part = 'form-data; name="x"'
    assert "at most 64 parts" in refused(body(*[(part, b"")] * (multipart.MAX_PARTS + 1))).message
    assert refused(body((part, b"x" * (multipart.MAX_FIELD_BYTES + 1)))).violations[0].field == "x"
    assert refused(body((part + "\r\nX-Long: " + "y" * 5000, b""))).reason == "INVALID_MULTIPART"
    assert refused(body((part + "\r\nX: y" * 20, b""))).reason == "INVALID_MULTIPART"
    assert refused(body((part, b"\xff\xfe"))).message == "x: must be UTF-8 text"
    big = b"z" * (multipart.MAX_FIELD_BYTES * 3)
    assert read(body((part + '; filename="f"', big))).files[0].data == big


def test_texts_become_what_json_would_have_had() -> None:
    def values(**texts: list[str]) -> dict[str, object]:
        kinds = {"integers": {"i"}, "numbers": {"f"}, "booleans": {"b"}, "lists": {"l"}}
        return form_values(Form(texts, ()), **kinds)

    assert values(i=["50"], f=["1.5"], b=["True"], s=["1"], l=["a", "b"], empty=[""]) == {
        "i": 50, "f": 1.5, "b": True, "s": "1", "l": ["a", "b"],
    }  # fmt: skip
    for texts, words in (
        ({"i": ["abc"]}, "i: must be a whole number, got 'abc'"),
        ({"i": ["1.0"]}, "i: must be a whole number"),
        ({"i": ["1_000"]}, "i: must be a whole number"),
        ({"i": ["٣"]}, "i: must be a whole number"),
        ({"i": ["9" * 5000]}, "i: must be a whole number"),
        ({"f": ["abc"]}, "f: must be a number"),
        ({"b": ["yes"]}, "b: must be true or false"),
        ({"s": ["a", "b"]}, "s: is given 2 times"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            values(**texts)

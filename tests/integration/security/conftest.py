"""Certificates for a module's tests; one who changes files makes a set of its own."""

from __future__ import annotations

import pytest

from tests.support.certificates import DevCerts


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> DevCerts:
    """Shared: do not change."""
    return DevCerts.make(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> DevCerts:
    """The same of another authority."""
    return DevCerts.make(tmp_path_factory.mktemp("strangers"))

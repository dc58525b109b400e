"""The port of the endpoint: an address that is not of this machine is refused in a sentence."""

from __future__ import annotations

import pytest

from gradwatch.endpoint.address import Address
from gradwatch.endpoint.listening_port import AddressError, listening_socket


def test_an_address_of_another_machine_is_refused_in_a_sentence() -> None:
    """With what to write instead; the training goes on without an endpoint."""
    with pytest.raises(AddressError, match=r"203\.0\.113\.1 is no address of this machine.*0\.0\.0\.0"):
        listening_socket(Address("203.0.113.1", 29440))

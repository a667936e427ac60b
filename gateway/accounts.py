"""What each API key has used, against its limits. Pure: callers say what time it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from gateway.token_bucket import TokenBucket
from omnicore import errors
from omnicore.api_keys import ApiKey

# Long enough not to be hammered, short enough to use a place that became free.
RETRY_AFTER_S = 1.0
OTHERS = "other"
"""Label of the keys that have none of their own in the metrics."""


class Elsewhere(Protocol):
    """What other processes of this gateway use of a key, and how they learn of what is used here."""

    def add(self, requests: int, tokens: int, active: int) -> None:
        """Here more was used, or given back."""
        ...

    def others(self) -> tuple[int, int, int]:
        """Requests and tokens used so far elsewhere, and requests that run or wait there."""
        ...


class Account:
    """One key's use. Its limits follow the key's line, its use outlives changes of it."""

    __slots__ = (
        "_active_elsewhere", "_elsewhere", "_requests", "_seen", "_tokens", "active", "admitted", "key", "limited",
        "rejected", "tokens_used",
    )  # fmt: skip

    def __init__(self, key: ApiKey, now_s: float, elsewhere: Elsewhere | None = None) -> None:
        self.active = 0
        """Requests that run or wait."""
        self.admitted = 0
        self.rejected: Counter[str] = Counter()
        """By reason."""
        self.tokens_used = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._elsewhere = elsewhere
        self._active_elsewhere = 0
        # What was used there before we came is no business of our buckets, which begin full.
        self._seen = elsewhere.others()[:2] if elsewhere is not None else (0, 0)
        self.set_key(key, now_s)

    def set_key(self, key: ApiKey, now_s: float) -> None:
        """Its line has changed."""
        self.key = key
        self._requests = _bucket(self._requests, key.requests_per_minute, now_s)
        self._tokens = _bucket(self._tokens, key.tokens_per_minute, now_s)
        self.limited = bool(self._requests or self._tokens or key.max_concurrent)

    def check(self, now_s: float) -> errors.ResourceExhaustedError | None:
        """The error for one more request now, which then counts nothing; None, and it counts."""
        if (refusal := self.refusal(1, now_s)) is None:
            self._count_request(1, now_s)
        return refusal

    def refusal(self, count: int, now_s: float) -> errors.ResourceExhaustedError | None:
        """The error for ``count`` more requests now; None if all of them may come. Counts nothing."""
        if self._elsewhere is not None:
            self._hear_of_others(self._elsewhere, now_s)
        if self._requests is not None and (wait_s := self._requests.wait_s(now_s, count)) > 0:
            return self._refusal("rate_limited", f"{self.key.requests_per_minute} requests per minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s)) > 0:
            return self._refusal("token_limited", f"{self.key.tokens_per_minute} tokens per minute", wait_s)
        if self.key.max_concurrent and self.active + self._active_elsewhere + count > self.key.max_concurrent:
            return self._refusal("too_many_concurrent", f"{self.key.max_concurrent} requests at once", RETRY_AFTER_S)
        return None

    def most_at_once(self) -> tuple[int, str] | None:
        """How many requests can ever come together, and by which limit; None: any number."""
        limits = (
            (self.key.max_concurrent, "max_concurrent"),
            (self.key.requests_per_minute, "requests_per_minute"),
        )
        return min((limit for limit in limits if limit[0]), default=None)

    def enter(self) -> None:
        """One more runs or waits."""
        self.active += 1
        if self._elsewhere is not None:
            self._elsewhere.add(0, 0, 1)

    def exit(self) -> None:
        """One that waited does no longer, and has not run."""
        self.active -= 1
        if self._elsewhere is not None:
            self._elsewhere.add(0, 0, -1)

    def not_served(self, now_s: float) -> None:
        """A request that counted was not admitted after all."""
        self._count_request(-1, now_s)

    def served(self, tokens: int, now_s: float) -> None:
        """A request that ran has ended, and used ``tokens``."""
        self.active -= 1
        self.tokens_used += tokens
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)
        if self._elsewhere is not None:
            self._elsewhere.add(0, tokens, -1)

    def _count_request(self, count: int, now_s: float) -> None:
        if self._requests is not None:
            self._requests.take(count, now_s)
        if self._elsewhere is not None:
            self._elsewhere.add(count, 0, 0)

    def _hear_of_others(self, elsewhere: Elsewhere, now_s: float) -> None:
        """What was used elsewhere since we last looked leaves our buckets, too."""
        requests, tokens, self._active_elsewhere = elsewhere.others()
        if self._requests is not None:
            self._requests.take(requests - self._seen[0], now_s)
        if self._tokens is not None:
            self._tokens.take(tokens - self._seen[1], now_s)
        self._seen = (requests, tokens)

    def _refusal(self, cause: str, limit: str, wait_s: float) -> errors.ResourceExhaustedError:
        self.rejected[cause] += 1
        return errors.ResourceExhaustedError(
            f"the API key {self.key.id!r} is limited to {limit}: try again in {math.ceil(wait_s)} s",
            reason="RATE_LIMITED",
            metadata={"key_id": self.key.id, "limit": limit, "cause": cause},
            retry_after_s=math.ceil(wait_s),
        )


class Accounts:
    """The accounts of all keys that were seen."""

    def __init__(
        self, most_labels: int = 200, *, elsewhere: Callable[[str], Elsewhere | None] = lambda key_id: None
    ) -> None:
        """``most_labels``: keys that have a label of their own in the metrics. ``elsewhere``: of a key's id, where more
        processes serve it."""
        self._accounts: dict[str, Account] = {}
        self._elsewhere = elsewhere
        self._most_labels = most_labels

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, key: ApiKey, now_s: float) -> Account:
        """The account of ``key``."""
        account = self._accounts.get(key.id)
        if account is None:
            account = self._accounts[key.id] = Account(key, now_s, self._elsewhere(key.id) if key.id else None)
        elif account.key is not key:
            account.set_key(key, now_s)
        return account

    def forget_others(self, keys: Iterable[ApiKey]) -> None:
        """The file has these keys now: what is not in use and not among them is let go."""
        known = {key.id for key in keys} | {""}
        for key_id in [key_id for key_id, account in self._accounts.items() if not account.active]:
            if key_id not in known:
                del self._accounts[key_id]

    def labelled(self) -> Iterator[tuple[str, Account]]:
        """Accounts with the labels that they have in the metrics: of the first keys their ids, then ``OTHERS``."""
        named = (account for key_id, account in self._accounts.items() if key_id)
        for number, account in enumerate(named):
            yield (account.key.id if number < self._most_labels else OTHERS), account


def _bucket(former: TokenBucket | None, per_minute: int, now_s: float) -> TokenBucket | None:
    if not per_minute:
        return None
    if former is None:
        return TokenBucket(per_minute, now_s)
    if former.per_minute != per_minute:
        former.change(per_minute, now_s)
    return former

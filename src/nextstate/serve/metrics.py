"""What Prometheus reads at /metrics: requests as they come, and the store's counts as they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextstate.learn.watch import comparisons
from nextstate.store.pulse import pulse
from nextstate.store.status import status
from nextstate.store.store import Store
from nextstate.types import TurnState

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """The metrics of one app, in a registry of their own."""

    def __init__(self, store: Store, engine_load: Callable[[], tuple[int, int]]) -> None:
        """Args:
        engine_load: sequences running and waiting now.
        """
        self._registry = registry = CollectorRegistry()
        registry.register(_FromStore(store, engine_load))
        self.requests = Counter("nextstate_requests", "HTTP requests answered", ["route", "status"], registry=registry)
        self.placements = Counter("nextstate_placements", "Turns opened, by kind", ["kind"], registry=registry)
        self.redactions = Counter("nextstate_redactions", "Texts taken out before storing", ["kind"], registry=registry)
        self.overloaded = Counter("nextstate_overloaded", "Requests answered 429", registry=registry)
        self.ignored_fields = Counter(
            "nextstate_ignored_fields", "Request fields that changed nothing", ["field"], registry=registry
        )
        self.prompt_tokens = Counter("nextstate_prompt_tokens", "Prompt tokens of turns opened", registry=registry)
        self.reply_tokens = Counter("nextstate_reply_tokens", "Tokens generated", registry=registry)
        self.first_token_s = Histogram(
            "nextstate_first_token_seconds", "Request to first token", registry=registry, buckets=_SECONDS
        )
        self.between_tokens_s = Histogram(
            "nextstate_between_tokens_seconds", "Token to token", registry=registry, buckets=_SECONDS
        )

    def count_redactions(self, found: Mapping[str, int]) -> None:
        for kind, times in found.items():
            self.redactions.labels(kind).inc(times)

    def text(self) -> bytes:
        """The page, in Prometheus' text format. Reads the store, so call it in a thread."""
        return generate_latest(self._registry)


class _FromStore(Collector):
    """Counts that live in the store, so that they are right after a restart and whoever changed them."""

    def __init__(self, store: Store, engine_load: Callable[[], tuple[int, int]]) -> None:
        self._store, self._engine_load = store, engine_load

    def describe(self) -> Iterable[Metric]:
        return []  # nothing to read from the store when the registry starts

    def collect(self) -> Iterable[Metric]:
        now = self._store.read_now(status)
        turns = GaugeMetricFamily(
            "nextstate_turns", "Turns by where they stand, and why there", labels=["state", "reason"]
        )
        turns.add_metric([TurnState.TRAINED, ""], now.trained)
        for reason, count in now.waiting.items():
            turns.add_metric(["waiting", reason], count)
        for reason, count in now.left_out.items():
            turns.add_metric([TurnState.LEFT_OUT, reason], count)
        yield turns
        verdicts = CounterMetricFamily("nextstate_verdicts", "Verdicts given", labels=["value"])
        for value, count in now.verdicts.items():
            verdicts.add_metric([value], count)
        yield verdicts
        left_alone = now.judge_left_alone_since is not None
        yield GaugeMetricFamily("nextstate_judge_left_alone", "1 while the judge is down", value=int(left_alone))
        against = GaugeMetricFamily(
            "nextstate_judge_against_feedback",
            "Verdicts on turns with explicit feedback, by outcome",
            labels=["outcome"],
        )
        for outcome, count in now.judge_against_feedback.items():
            against.add_metric([outcome], count)
        yield against
        updates = GaugeMetricFamily("nextstate_updates", "Updates by state", labels=["state"])
        for state, count in now.updates.items():
            updates.add_metric([state], count)
        yield updates
        yield from self._loops()
        yield GaugeMetricFamily("nextstate_sessions", "Sessions known", value=now.sessions)
        yield GaugeMetricFamily("nextstate_policy_version", "Version that serves", value=now.version)
        yield GaugeMetricFamily(
            "nextstate_learning_paused", "1 while nothing is trained or published", value=now.paused_since is not None
        )
        running, waiting = self._engine_load()
        yield GaugeMetricFamily("nextstate_engine_running", "Sequences in the engine", value=running)
        yield GaugeMetricFamily("nextstate_engine_waiting", "Sequences that wait for the engine", value=waiting)

    def _loops(self) -> Iterable[Metric]:
        """Whether the loops live, and what came of their work last."""
        now = self._store.read_now(pulse)
        waited = GaugeMetricFamily(
            "nextstate_oldest_waiting_seconds", "Age of the oldest turn that waits", labels=["reason"]
        )
        for reason, age_s in now.waited_s.items():
            waited.add_metric([reason], age_s)
        yield waited
        yield GaugeMetricFamily(
            "nextstate_turns_since_verdict", "Turns newer than any with a verdict", value=now.turns_since_verdict
        )
        for name, what, at in (
            ("nextstate_last_verdict_timestamp_seconds", "When the newest verdict was given", now.verdict_at),
            ("nextstate_last_update_timestamp_seconds", "When the newest update was done", now.trained_at),
        ):
            if at is not None:
                yield GaugeMetricFamily(name, what, value=at)
        events = CounterMetricFamily("nextstate_events", "Events written down, by kind", labels=["kind"])
        for kind, count in now.events.items():
            events.add_metric([kind], count)
        yield events
        for name, what, numbers in (
            ("nextstate_last_update", "What the newest update measured", now.last_update),
            ("nextstate_last_gate", "What the gate measured of the newest version", now.last_gate),
        ):
            measured = GaugeMetricFamily(name, what, labels=["measure"])
            for measure, value in numbers.items():
                measured.add_metric([measure], value)
            yield measured
        watched = self._store.read_now(comparisons)
        evidence = max((one.e_value for one in watched), default=1.0)
        yield GaugeMetricFamily(
            "nextstate_watch_e_value", "Most evidence against a version that serves; 1 is none", value=evidence
        )


class CountRequests:
    """Counts requests by route and status when their answer starts."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Any path may be asked for; only ours become labels, so that the page cannot be made to grow.
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)

"""Admission of an attempt's nodes, before any worker starts: their agents meet, and no node is unfit."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.diagnosis.nodes.checks import failure_kind
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.schemas.agent_messages import AgreedStep, NodeState, Orders, Ready
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.probe import NodeFacts, NodeSpeed
from rlhf_core.worker.agent.agreement import Agreement
from rlhf_core.worker.agent.arrivals import CONNECT_S, Arrivals
from rlhf_core.worker.agent.decisions import GroupDecisions
from rlhf_core.worker.agent.job import Job
from rlhf_core.worker.agent.leader import Leader
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.probe import FACTS_S, Probe, in_a_sentence
from rlhf_core.worker.supervision.external_requests import ExternalRequests

MISPLACED_INTERVAL_S = 1.0
"""Interval at which agent 0 looks for files from nodes that report they cannot join, in seconds."""


class NodeAdmission:
    """Admission of the nodes of one attempt, as one of their agents takes part in it."""

    def __init__(
        self,
        job: Job,
        channel: AgentChannel,
        leader: Leader,
        agreement: Agreement,
        decisions: GroupDecisions,
        requests: ExternalRequests,
        fork_server: ForkServer,
    ) -> None:
        self._job = job
        self._channel = channel
        self._leader = leader
        self._agreement = agreement
        self._decisions = decisions
        self._requests = requests
        self._fork_server = fork_server
        self._arrivals = Arrivals(job.nodes, job.attempt_dir, job.spec.supervise.join_s)
        self._probe = Probe(job.run_dir, job.attempt, job.nodes, job.spec, job.placement, channel.endpoint)
        self._is_probed = any(plan.role is Role.PROBE for plan in job.placement.groups)

    @property
    def measures(self) -> bool:
        """True if the nodes are measured, and not only compared."""
        return self._is_probed and self._probe.measures

    def admit(self) -> AgreedStep | None:
        """Wait for all nodes and check them; return the end of the attempt if one is missing or unfit."""
        return self._meet() or (self._check_nodes() if self._is_probed else None)

    def _meet(self) -> AgreedStep | None:
        """On agent 0, wait until every node's agent has joined; return the end if one does not join in time."""
        channel = self._channel
        if channel.nodes.num == 1:
            return None
        channel.send("hello", Ready())
        if not channel.leads:
            return None
        next_check_s = 0.0

        def have_all_joined() -> bool:
            nonlocal next_check_s
            # The first state of each node also gives the first measurement of its clock.
            joined = channel.received("hello", Ready).keys() & channel.received("state", NodeState).keys()
            if len(joined) == channel.nodes.num or self._requests.to_end:
                return True
            now_s = time.monotonic()
            if now_s < next_check_s:
                return False
            next_check_s = now_s + MISPLACED_INTERVAL_S
            accounted_for = {channel.nodes.names[index] for index in joined} | {
                one.node for one in node_facts.all_confused(self._job.attempt_dir)
            }
            return accounted_for >= set(channel.nodes.names)

        self._agreement.wait_until(have_all_joined, self._arrivals.limit_s)
        if not have_all_joined() and self._arrivals.have_all_started():
            self._agreement.wait_until(have_all_joined, CONNECT_S)
        joined = [name for index, name in enumerate(channel.nodes.names) if index in channel.received("hello", Ready)]
        if len(joined) < channel.nodes.num and not self._requests.to_end:
            step = self._without(joined)
            channel.publish("orders", Orders(over=step))
            return step
        self._leader.events.add(
            "peer", f"the agents of all {channel.nodes.num} nodes have joined: {', '.join(channel.nodes.names)}"
        )
        return None

    def _without(self, joined: Sequence[str]) -> AgreedStep:
        """End the attempt because only some of the agents have joined."""
        if self._probe.without(joined):
            return self._after_checks(last=True)
        self._report_checks()
        reason = "not retried in place, because the agents of the allocation did not all meet"
        return self._fail(self._arrivals.failure(joined), Choice(Action.NEW_ATTEMPT, reason))

    def _check_nodes(self) -> AgreedStep | None:
        """Compare and measure the nodes; return the end if one of them is unfit."""
        probe, requests, decisions = self._probe, self._requests, self._decisions
        restart_dir = self._job.attempt_dir.restart(0)

        def after_facts(facts: Mapping[int, NodeFacts]) -> AgreedStep:
            # A node that cannot read its orders is a finding; it does not abort the attempt here.
            unread = requests.broken_kind is FailureKind.CONFIG and requests.broken_node != ""
            step = decisions.requested_end() if unread else decisions.may_start(restart_dir)
            if step is not None and step.action == "end":
                return step
            ahead_s = {index: self._channel.ahead_s(index) for index in facts}
            probe.take_facts(facts, ahead_s, {requests.broken_node: requests.broken} if unread else {})
            return self._after_checks(last=not probe.measures)

        def after_speeds(speeds: Mapping[int, NodeSpeed], number: int) -> AgreedStep:
            step = decisions.may_start(restart_dir)
            if step.action == "end":
                return step
            return AgreedStep(action="again") if probe.take_speeds(speeds, number) else self._after_checks(last=True)

        step = self._agreement.complete(self._agreement.agree("facts", probe.facts(), NodeFacts, after_facts, FACTS_S))
        for number in (1, 2):
            if probe.measures and step.action in ("start", "again"):
                speed = probe.measure(number, self._fork_server, self._agreement.is_ending)
                after = partial(after_speeds, number=number)
                step = self._agreement.complete(
                    self._agreement.agree(f"speed-{number}", speed, NodeSpeed, after, probe.timeout_s)
                )
            if step.action != "again":
                break
        return step if step.action == "end" else None

    def _after_checks(self, *, last: bool) -> AgreedStep:
        """Decide on the findings so far; they are recorded once they end the attempt or are complete."""
        blocking = [one for one in self._probe.report().results if one.status is CheckStatus.BLOCKED]
        if blocking or last:
            self._report_checks()
        return self._unfit(blocking) if blocking else AgreedStep(action="start")

    def _report_checks(self) -> None:
        report = self._probe.report()
        self._leader.write(self._job.attempt_dir.probe_report, report)
        counts = Counter(one.status.value for one in report.results)
        listed = ", ".join(f"{count} {status}" for status, count in counts.items())
        self._leader.events.add("probe", f"nodes checked in {report.seconds} s: {listed}", Role.PROBE)

    def _unfit(self, blocking: Sequence[CheckResult]) -> AgreedStep:
        """End the attempt because of these findings, with the nodes to exclude if nodes are to blame."""
        nodes = tuple(dict.fromkeys(one.node for one in blocking if one.node))
        kind = failure_kind(blocking)
        message = in_a_sentence(blocking)
        subject = f"{' '.join(sorted({one.id for one in blocking}))} {' '.join(nodes)}"
        blamed = nodes if kind is FailureKind.NODE_UNFIT else ()
        failure = Failure(kind, message, fingerprint(kind, subject), nodes=blamed)
        if kind is FailureKind.RENDEZVOUS:
            choice = Choice(Action.NEW_ATTEMPT, "not retried in place, because the nodes were late twice")
        else:
            choice = self._decisions.budget.choose(failure)
        return self._fail(failure, choice)

    def _fail(self, failure: Failure, choice: Choice) -> AgreedStep:
        """Record a failure before the workers start, and end the attempt."""
        restart_dir = self._job.attempt_dir.restart(0)
        number = self._leader.record_incident(restart_dir, failure)
        self._leader.record_decision(restart_dir, choice, number)
        return self._decisions.end(AttemptState.FAILED, failure.message, failure.kind)

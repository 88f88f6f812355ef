"""Decisions of agent 0 about worker groups: whether to start them, and how to respond when they exit."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.diagnosis.hangs.verdict import MAX_DESCRIBED
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.agent_messages import AgreedStep, NodeEnd
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.text.formatting import listed
from rlhf_core.worker.agent.damaged_checkpoints import DamagedCheckpoints
from rlhf_core.worker.agent.job import Job
from rlhf_core.worker.agent.leader import Leader, RestartBudget
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.store import host_worker_store
from rlhf_core.worker.command.launch_order import read_checkpoint
from rlhf_core.worker.evidence import exit_reports
from rlhf_core.worker.evidence.exit_reports import NodeReport
from rlhf_core.worker.groups.base import WorkerGroup
from rlhf_core.worker.supervision.external_requests import ExternalRequests


class GroupDecisions:
    """Agent 0's decisions; each is recorded before it is acted on."""

    def __init__(self, job: Job, channel: AgentChannel, leader: Leader, requests: ExternalRequests) -> None:
        self._job = job
        self._channel = channel
        self._leader = leader
        self._requests = requests
        self._worker_budgets: dict[Role, RestartBudget] = {}
        self._worker_stores: dict[Role, object] = {}
        self.budget = RestartBudget(job.run_dir, job.spec.supervise)
        """Budget of restarts in place."""
        self.num_restarts = 0
        """Restarts in place over the whole attempt."""
        self.generations: dict[Role, int] = {}
        """Newest generation of each group, except the one whose restarts are counted; across all phases."""
        self.damaged = DamagedCheckpoints(job.run_dir)

    # -----------------------------------------------------------------------------------------------------------------
    # Ends and starts

    def end(self, state: AttemptState, message: str, kind: FailureKind | None = None, ended_by: str = "") -> AgreedStep:
        """The end of the attempt."""
        num = self.num_restarts
        return AgreedStep(action="end", state=state, message=message, kind=kind, ended_by=ended_by, num_restarts=num)

    def begin_start(self, plan: GroupPlan, restart_dir: RestartDir) -> AgreedStep:
        """Open a new store for one start of the workers: an older store holds addresses of dead processes.

        The previous store is closed only now that all its workers have exited on all nodes.
        """
        step = self.may_start(restart_dir)
        nodes = self._job.nodes
        if step.action == "start" and len(plan.nodes) > 1:
            self._worker_stores[plan.role], store = host_worker_store(nodes.address, nodes.listening_address)
            step = step.model_copy(update={"store": store})
        return step

    def may_start(self, restart_dir: RestartDir) -> AgreedStep:
        """The next start, or the end of the attempt if that was requested or an agent was lost meanwhile."""
        step, requests = self.requested_end(), self._requests
        if step is None and requests.broken:
            # Takes precedence over a stop request: when one agent exits, Slurm ends the job with the same signal that
            # announces a preemption.
            failure = self._loss_of_an_agent()
            number = self._leader.record_incident(restart_dir, failure)
            choice = self._choice_at_the_end(self.budget.choose(failure))
            self._leader.record_decision(restart_dir, choice, number)
            step = self.end(AttemptState.FAILED, requests.broken, requests.broken_kind)
        if step is None and requests.stop:
            # Between two starts there is no state to save.
            step = self.end(AttemptState.PREEMPTED, f"ended between two starts of the workers: {requests.stop}")
        return step or AgreedStep(action="start")

    def requested_end(self) -> AgreedStep | None:
        """The end of the attempt if the user or a signal requested it, otherwise None."""
        requests = self._requests
        if requests.cancel:
            return self.end(AttemptState.CANCELLED, requests.cancel, FailureKind.USER_CANCEL)
        if requests.end:
            message = f"the agent was ended by {requests.end} from outside; the run can resume from its last checkpoint"
            return self.end(AttemptState.FAILED, message, FailureKind.PREEMPTION, requests.end)
        return None

    def _loss_of_an_agent(self) -> Failure:
        kind, node = self._requests.broken_kind, self._requests.broken_node
        return Failure(kind, self._requests.broken, fingerprint(kind, node), nodes=(node,) if node else ())

    def _choice_at_the_end(self, choice: Choice) -> Choice:
        """The choice, without a restart in place if the attempt is ending anyway."""
        ending = self._requests.broken or self._requests.stop
        return _not_in_place(choice, f"the attempt is ending: {ending}") if ending else choice

    def next_generation(self, role: Role) -> int:
        """Number of the next start of a group other than the one whose restarts are counted."""
        self.generations[role] = self.generations.get(role, -1) + 1
        return self.generations[role]

    def take_generations(self, step: AgreedStep) -> None:
        """Adopt the generations in agent 0's step."""
        for role, generation in step.generations.items():
            self.generations[role] = max(generation, self.generations.get(role, -1))

    # -----------------------------------------------------------------------------------------------------------------
    # Groups that are restarted together

    def conclude(self, group: WorkerGroup, ends: Mapping[int, NodeEnd], restart_dir: RestartDir) -> AgreedStep:
        """The step to take, given how a group's workers exited on all nodes."""
        step, requests = self.requested_end(), self._requests
        if step is not None:
            return step
        complete = len(ends) == self._job.nodes.num
        if complete and all(exit_reports.is_well(end) for end in ends.values()):
            return self._end_role(group.role, ends)
        names = self._job.nodes.names
        left = [names[index] for index, end in ends.items() if end.num_left]
        if requests.broken:
            failure = self._loss_of_an_agent()
        else:
            reports = [NodeReport(names[index], end, self._channel.ahead_s(index)) for index, end in ends.items()]
            failure = exit_reports.explain(reports, group.hang, self._resumed_from(group.role, restart_dir))
            at_work = [index for index, end in ends.items() if end.num_workers]
            if len(at_work) == 1 or len(left) < len(at_work):  # what holds those of every node is no fault of a node
                failure = replace(failure, nodes=tuple(sorted({*failure.nodes, *left})))
        failure = self.damaged.explained(failure, restart_dir)
        choice = self._choose(group, failure, restart_dir, left)
        if choice.action is Action.RESTART_IN_PLACE:
            self.num_restarts += 1
            return AgreedStep(action="restart", damaged=tuple(self.damaged.names))
        return self.end(AttemptState.FAILED, f"{failure.message} ({choice.reason})", failure.kind)

    def _end_role(self, role: Role, ends: Mapping[int, NodeEnd]) -> AgreedStep:
        outcomes = [worker.outcome for end in ends.values() for worker in end.workers]
        early = any(outcome.stopped_early for outcome in outcomes if outcome is not None)
        how = "saved a checkpoint and ended early" if early else "ended well"
        self._leader.events.add("role_ended", f"role {role} {how}", role, stopped_early=early)
        if early:
            stop = self._requests.stop
            why = stop or "another step and its checkpoint would not have fitted into the time limit"
            kind = None if stop else FailureKind.TIME_LIMIT
            return self.end(AttemptState.PREEMPTED, f"saved a checkpoint and ended early: {why}", kind)
        self.budget.renew()
        return AgreedStep(action="next_role", generations=dict(self.generations))

    def _resumed_from(self, role: Role, restart_dir: RestartDir) -> CheckpointDir | None:
        """The checkpoint that an external trainer was told to resume from; None for anything else."""
        if role is not Role.TRAINER:
            return None
        with contextlib.suppress(OSError):  # the failure is then explained without it
            return read_checkpoint(self._job.run_dir, restart_dir)
        return None

    def _choose(self, group: WorkerGroup, failure: Failure, restart_dir: RestartDir, left: Sequence[str]) -> Choice:
        """Record the failure and the decision about it, which may be carried out only after that.

        Args:
            left: Nodes with killed processes that have not ended: restarted workers would share the GPUs with them.
        """
        role = group.role
        failure = self.budget.confirmed(failure)
        evidence_dir = group.folder(0).evidence_dir
        number = self._leader.record_incident(restart_dir, failure, role, evidence_dir)
        choice = self.budget.choose(failure, self.damaged.remedy(failure))
        choice = self.damaged.choice_for(role, failure, choice)
        choice = self._choice_at_the_end(choice)
        choice = _not_beside(left, choice)
        self._leader.record_decision(restart_dir, choice, number)
        if failure.damaged_checkpoint and choice.action is not Action.STOP:
            self.damaged.put_aside(failure, restart_dir, self._leader.events)
        return choice

    # -----------------------------------------------------------------------------------------------------------------
    # Workers that are restarted alone

    def choose_for_worker(
        self,
        role: Role,
        failure: Failure,
        restart_dir: RestartDir,
        folder: RestartDir,
        left: Sequence[str],
        *,
        is_needed: bool,
    ) -> Choice:
        """Decide about one failed worker while all others keep running.

        Args:
            role: Role of its group.
            failure: The diagnosed failure.
            restart_dir: Current restart of the attempt.
            folder: Folder of the worker's start, which holds the evidence.
            left: Its node, if it has processes that were killed but have not ended.
            is_needed: False if the groups it serves have finished, so that it has nothing left to do.

        Returns:
            ``RESTART_WORKERS``, ``CONTINUE`` without it, or an action that ends the attempt.
        """
        spec = self._job.spec.supervise
        budget = self._worker_budgets.setdefault(role, RestartBudget(self._job.run_dir, spec))
        failure = budget.confirmed(failure)
        number = self._leader.record_incident(restart_dir, failure, role, folder.evidence_dir)
        if is_needed:
            choice = _not_beside(left, budget.choose(failure))
        else:
            choice = Choice(Action.CONTINUE, "the workers that it served have ended, so it is no longer needed")
        if choice.action is Action.RESTART_IN_PLACE:
            reason = f"{choice.reason}: only the failed worker restarts, all others continue"
            choice = Choice(Action.RESTART_WORKERS, reason)
        self._leader.record_decision(restart_dir, choice, number)
        return choice


def _not_in_place(choice: Choice, why: str) -> Choice:
    """The choice, with a new attempt instead of a restart in place."""
    if choice.action is not Action.RESTART_IN_PLACE:
        return choice
    return Choice(Action.NEW_ATTEMPT, f"not restarted in place, because {why}")


def _not_beside(left: Sequence[str], choice: Choice) -> Choice:
    """The choice, without a restart in place if nodes have killed processes that have not ended."""
    why = f"killed processes have not ended on {listed(left, MAX_DESCRIBED)}"
    return _not_in_place(choice, why) if left else choice

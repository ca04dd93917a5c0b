"""Bugs to plant: each is a context manager that puts one into the real classes. The simulation must find every one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from millrace.runtime.bells import BellTower
from millrace.runtime.channel import Channel
from millrace.runtime.exit import Exit
from millrace.stages import prefix
from millrace.stages.allocator import Allocator
from millrace.stages.blocks import BlockPool
from millrace.stages.followers import Followers
from millrace.stages.holdings import Holdings
from millrace.stages.host import HostTier
from millrace.stages.lives import Lives
from millrace.stages.messages import Ints, StepPlan
from millrace.stages.outbox import Choice, RequestOutbox
from millrace.stages.planner import Planner
from millrace.stages.runs import NO_DRAFT, Runs
from millrace.stages.scheduler import Scheduler
from millrace.stages.sequences import State
from millrace.stages.sharing import Sharing


@contextmanager
def changed(owner: object, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """While it lasts, `owner.name` is what `change` makes of it."""
    with MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield


def lost_free_on_abort() -> AbstractContextManager[None]:
    """Schedule does not tell allocate of sequences that end any other way than by the device's word."""

    def change(end: Any) -> Any:
        def lossy(self: Lives, sequence_id: int) -> None:
            sequence = self.sequences.get(sequence_id)
            end(self, sequence_id)
            is_told = sequence is not None and self.news.ended[-1:] == [sequence.slot]
            if is_told and sequence_id not in finished_by_device:
                self.news.ended.pop()

        return lossy

    finished_by_device: set[int] = set()

    @contextmanager
    def planted() -> Iterator[None]:
        on_done = Scheduler.on_done

        def noting(self: Scheduler, done: Any) -> None:
            finished_by_device.update(done.sequence_ids[done.is_finished].tolist())
            on_done(self, done)
            finished_by_device.clear()

        with MonkeyPatch.context() as patch, changed(Lives, "end", change):
            patch.setattr(Scheduler, "on_done", noting)
            yield

    return planted()


def double_free() -> AbstractContextManager[None]:
    """The first of several blocks that come free goes on the free stack twice."""

    def change(release: Any) -> Any:
        def twice(self: BlockPool, blocks: Ints) -> None:
            release(self, blocks)
            if len(blocks) > 1 and self.num_free < self.num_blocks:
                release(self, blocks[:1])

        return twice

    return changed(BlockPool, "_release", change)


def missed_wake_up() -> AbstractContextManager[None]:
    """A sender that is cancelled after it was promised room takes the room with it: whoever is behind it sleeps on."""

    def change(wait: Any) -> Any:
        async def lossy(self: Channel[Any]) -> None:
            promise: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._senders.append(promise)
            await promise

        return lossy

    return changed(Channel, "_wait_for_room", change)


def bells_beyond_a_turn_forgotten() -> AbstractContextManager[None]:
    """Of stages that are rung for together, those beyond what is woken in one turn of the loop sleep on."""

    def change(wake_some: Any) -> Any:
        def forgetful(self: BellTower) -> None:
            wake_some(self)
            self._rung.clear()

        return forgetful

    return changed(BellTower, "_wake_some", change)


def duplicate_terminal_event() -> AbstractContextManager[None]:
    """A choice that has ended says so again whenever its client looks."""

    def change(take: Any) -> Any:
        def repeating(self: Choice) -> Any:
            self.is_told = False
            return take(self)

        return repeating

    return changed(Choice, "take", change)


def second_end() -> AbstractContextManager[None]:
    """The exit forgets that a request has ended while it tells everybody."""

    def change(end: Any) -> Any:
        def again(self: Exit[Any], request_id: str, cause: str, error: BaseException | None = None) -> bool:
            outbox = self.live.get(request_id)
            is_ended: bool = end(self, request_id, cause, error)
            if is_ended and outbox is not None and cause == "cancel":
                for callback in self.on_end:
                    callback(outbox, cause, error)
            return is_ended

        return again

    return changed(Exit, "end", change)


def early_reuse() -> AbstractContextManager[None]:
    """Blocks are free at once, whatever steps in flight still use them."""

    def change(give_back: Any) -> Any:
        def hasty(self: BlockPool, blocks: Ints, last_step: int, completed_step: int) -> None:
            give_back(self, blocks, completed_step, completed_step)

        return hasty

    return changed(BlockPool, "give_back", change)


def trusted_digest() -> AbstractContextManager[None]:
    """Blocks are found by their keys alone."""

    def change(find: Any) -> Any:
        def trusting(self: Any, key: bytes, before: int | str, tokens: bytes) -> tuple[int, int] | None:
            block = self.blocks.get(key)
            return None if block is None else (block, self.entries[block][3])

        return trusting

    return changed(prefix._Tier, "find", change)


def kept_despite_void() -> AbstractContextManager[None]:
    """What a step should have filled that did not happen counts as filled."""

    def change(settle: Any) -> Any:
        def gullible(self: Sharing, plan: StepPlan) -> None:
            settle(self, replace(plan, voided=()))

        return gullible

    return changed(Sharing, "settle", change)


def freed_by_the_first_holder() -> AbstractContextManager[None]:
    """A shared block leaves with the first table that gives it back."""

    def change(share: Any) -> Any:
        def counting_nobody(self: BlockPool, blocks: Ints) -> None:
            share(self, blocks)
            self.num_tables[blocks] = 1

        return counting_nobody

    return changed(BlockPool, "share", change)


def shared_too_early() -> AbstractContextManager[None]:
    """A prompt's blocks can be found as soon as their step is granted."""

    def change(note_grant: Any) -> Any:
        def hasty(self: Sharing, step: int, *columns: Any) -> None:
            note_grant(self, -1, *columns)

        return hasty

    return changed(Sharing, "note_grant", change)


def forked_one_token_too_many() -> AbstractContextManager[None]:
    """One token more counts as copied than two blocks have in common."""

    def change(find: Any) -> Any:
        def generous(self: Followers, before: int | str, tokens: bytes, least: int) -> tuple[int, int] | None:
            found = find(self, before, tokens, least)
            return None if found is None else (found[0], min(found[1] + 1, len(tokens) // 4))

        return generous

    return changed(Followers, "find", change)


def fork_source_not_held() -> AbstractContextManager[None]:
    """The block that a sequence copies from may be given away before it is copied."""

    def change(attach: Any) -> Any:
        def careless(self: Holdings, plan: StepPlan, row: int, *, may_fork: bool) -> None:
            attach(self, plan, row, may_fork=may_fork)
            beginning = self.begun.get(int(plan.slots[row]))
            if beginning is not None and beginning.source is not None:
                self.pool.give_back(np.array([beginning.source], np.int32), -1, self.completed_step)

        return careless

    def change_fork(fork: Any) -> Any:
        def without_giving_back(self: Holdings, step: int) -> None:
            give_back, self.pool.give_back = self.pool.give_back, lambda *_: None  # type: ignore[method-assign]
            fork(self, step)
            self.pool.give_back = give_back  # type: ignore[method-assign]

        return without_giving_back

    def change_give_up(give_up: Any) -> Any:
        def without_giving_back(self: Holdings, slot: int) -> None:
            beginning = self.begun.get(slot)
            if beginning is not None and beginning.source is not None:
                self.begun[slot] = replace(beginning, source=None)
            give_up(self, slot)

        return without_giving_back

    @contextmanager
    def planted() -> Iterator[None]:
        with MonkeyPatch.context() as patch:
            for name, made in (
                ("attach", change),
                ("fork", change_fork),
                ("_give_up_beginning", change_give_up),
            ):
                patch.setattr(Holdings, name, made(getattr(Holdings, name)))
            yield

    return planted()


def fork_source_reused_while_copied() -> AbstractContextManager[None]:
    """The block that a sequence copies from comes free as soon as the step that copies it is granted."""

    def change(fork: Any) -> Any:
        def hasty(self: Holdings, step: int) -> None:
            fork(self, -1)

        return hasty

    return changed(Holdings, "fork", change)


def forked_block_never_let_go() -> AbstractContextManager[None]:
    """Whoever copies from a block goes on holding it."""

    def change(fork: Any) -> Any:
        def clinging(self: Holdings, step: int) -> None:
            give_back, self.pool.give_back = self.pool.give_back, lambda *_: None  # type: ignore[method-assign]
            fork(self, step)
            self.pool.give_back = give_back  # type: ignore[method-assign]

        return clinging

    return changed(Holdings, "fork", change)


def tails_of_other_salts() -> AbstractContextManager[None]:
    """A first block is copied whoever computed it."""

    def change(name: str) -> Any:
        def of(method: Any) -> Any:
            def unsalted(self: Followers, *args: Any) -> Any:
                at = 0 if name == "find" else 1
                before = "" if isinstance(args[at], str) else args[at]
                return method(self, *args[:at], before, *args[at + 1 :])

            return unsalted

        return of

    @contextmanager
    def planted() -> Iterator[None]:
        with MonkeyPatch.context() as patch:
            for name in ("find", "add", "add_tail", "remove"):
                patch.setattr(Followers, name, change(name)(getattr(Followers, name)))
            yield

    return planted()


def tail_found_too_early() -> AbstractContextManager[None]:
    """The tail of a prompt can be found as soon as its step is granted."""

    def change(note_grant: Any) -> Any:
        def hasty(self: Sharing, step: int, slots: Any, starts: Ints, ends: Ints, found: Ints) -> None:
            note_grant(self, step, slots, starts, ends, found)
            for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
                chain = self._chain(slot)
                if end == self._num_known[slot] and chain.num_blocks == chain.num_known:
                    self._num_settled[slot] = end
                    self._put_tail(slot, chain)

        return hasty

    return changed(Sharing, "note_grant", change)


def sleeping_client() -> AbstractContextManager[None]:
    """The end of a request does not wake its client."""

    def change(end: Any) -> Any:
        def silent(self: RequestOutbox, cause: str, error: BaseException | None) -> None:
            self.bell, bell = BellTower().bell(), self.bell  # one that nobody hears
            end(self, cause, error)
            self.bell = bell

        return silent

    return changed(RequestOutbox, "end", change)


def reused_while_copied() -> AbstractContextManager[None]:
    """The blocks of a victim come free when its own last step is done, though a later one copies them."""

    def change(preempt: Any) -> Any:
        def hasty(self: Holdings, slot: int, step: int) -> None:
            preempt(self, slot, int(self.last_step[slot]))

        return hasty

    return changed(Holdings, "preempt", change)


def swap_kept_despite_void() -> AbstractContextManager[None]:
    """What a step should have copied to the host that did not happen counts as copied."""

    def change(give_up: Any) -> Any:
        def gullible(self: Lives, void_step: int) -> None:
            pass

        return gullible

    return changed(Lives, "give_up_swapped", change)


def lost_host_blocks() -> AbstractContextManager[None]:
    """Sequences that end while they are swapped out leave their blocks on the host for good."""

    def change(discard: Any) -> Any:
        def silent(self: Lives, sequence: Any) -> None:
            discard(self, sequence)
            self.news.discarded.clear()

        return silent

    return changed(Lives, "_discard", change)


def host_reused_early() -> AbstractContextManager[None]:
    """Host blocks are free as soon as the copy back is granted."""

    def change(release: Any) -> Any:
        def hasty(self: HostTier, sequence_id: int, last_step: int, completed_step: int) -> None:
            release(self, sequence_id, completed_step, completed_step)

        return hasty

    return changed(HostTier, "release", change)


def half_a_block_forgotten() -> AbstractContextManager[None]:
    """Only full blocks are copied to the host, and the tokens in the last one count as copied, too."""

    def change(preempt: Any) -> Any:
        def short(self: Holdings, slot: int, step: int) -> None:
            num_copies = len(self.copies)
            num_full = int(self.tables.num_tokens[slot]) // self.pool.block_size
            preempt(self, slot, step)
            if len(self.copies) > num_copies:
                copy = self.copies.pop()
                self.copies.append(
                    replace(copy, sources=copy.sources[:num_full], destinations=copy.destinations[:num_full])
                )

        return short

    return changed(Holdings, "preempt", change)


def parked_for_good() -> AbstractContextManager[None]:
    """Whoever is parked after its blocks were taken is not put back in line."""

    def change(unpark: Any) -> Any:
        def forgetful(self: Lives, sequence_id: int) -> None:
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence.state is not State.PARKED:
                unpark(self, sequence_id)

        return forgetful

    return changed(Lives, "unpark", change)


def moved_despite_void() -> AbstractContextManager[None]:
    """Cached blocks that a step should have copied to the host that did not happen count as copied."""

    def change(settle: Any) -> Any:
        def gullible(self: HostTier, completed_step: int, voided: Any, generation: int) -> list[int]:
            return list(settle(self, completed_step, (), -1))

        return gullible

    return changed(HostTier, "settle", change)


def trusted_drafts() -> AbstractContextManager[None]:
    """The token behind the first draft that was wrong counts, too."""

    def change(that_count: Any) -> Any:
        def trusting(self: Runs, token_ids: Any) -> Any:
            rows = that_count(self, token_ids)
            more = rows[self.drafts[rows] != NO_DRAFT] + 1
            return np.union1d(rows, more)

        return trusting

    return changed(Runs, "that_count", change)


def drafts_computed_for_good() -> AbstractContextManager[None]:
    """What a step drafts counts as computed, right or wrong."""

    def change(serve: Any) -> Any:
        def gullible(self: Allocator, plan: StepPlan) -> Any:
            grant, report = serve(self, plan)
            if grant is not None and grant.drafts is not None:
                self.tables.num_tokens[grant.slots] += grant.drafts.counts
            return grant, report

        return gullible

    def change_note(take_note: Any) -> Any:
        def deaf(self: Holdings, plan: StepPlan) -> None:
            take_note(self, replace(plan, accepted=()))

        return deaf

    @contextmanager
    def planted() -> Iterator[None]:
        with changed(Allocator, "serve", change), changed(Holdings, "take_note", change_note):
            yield

    return planted()


def accepted_drafts_forgotten() -> AbstractContextManager[None]:
    """Allocate does not hear of drafts that were accepted."""

    def change(take_note: Any) -> Any:
        def deaf(self: Holdings, plan: StepPlan) -> None:
            take_note(self, replace(plan, accepted=()))

        return deaf

    return changed(Holdings, "take_note", change)


def drafting_rows_run_ahead() -> AbstractContextManager[None]:
    """A row is planned again before it is known how many of its drafts were right."""

    def change(held: Any) -> Any:
        def hasty(self: Planner, slots: Any, flights: Any, *, is_drafting_time: bool) -> Any:
            return np.zeros(len(slots), np.bool_)

        return hasty

    return changed(Planner, "_held", change)


BUGS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    bug.__name__: bug
    for bug in (
        lost_free_on_abort,
        double_free,
        missed_wake_up,
        bells_beyond_a_turn_forgotten,
        duplicate_terminal_event,
        early_reuse,
        sleeping_client,
        second_end,
        trusted_digest,
        kept_despite_void,
        freed_by_the_first_holder,
        shared_too_early,
        forked_one_token_too_many,
        fork_source_not_held,
        fork_source_reused_while_copied,
        forked_block_never_let_go,
        tails_of_other_salts,
        tail_found_too_early,
        reused_while_copied,
        swap_kept_despite_void,
        lost_host_blocks,
        host_reused_early,
        half_a_block_forgotten,
        parked_for_good,
        moved_despite_void,
        trusted_drafts,
        drafts_computed_for_good,
        accepted_drafts_forgotten,
        drafting_rows_run_ahead,
    )
}

"""Do the tests bite? Plant one bug at a time into a copy of the core and see who notices.

usage: python tools/mutants.py [--only WORDS] [--processes 2]

First the exact oracle runs (tools/simulate_core.py, a reduced amount), then, if that sees nothing,
the unit tests of the core. Exit code 1 when a bug survives both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORACLE_STEPS = 40_000
TIMEOUT_S = 400
COPIED_TESTS = (
    "__init__.py",
    "fake_device.py",
    "thinning.py",
    "simulated_world.py",
    "test_engine.py",
    "cost/__init__.py",
    "cost/known_models.py",
    "cost/random_setups.py",
    "cost/test_pricer.py",
    "observe/__init__.py",
    "observe/priced.py",
    "speculation/__init__.py",
    "speculation/drafted.py",
    "speculation/hosted.py",
    "speculation/test_controller.py",
    "speculation/test_controller_in_flight.py",
    "extensions/__init__.py",
    "extensions/toy_policy.py",
)

ENGINE = "engine.py"
SCHEDULER = "scheduler/scheduler.py"
RESULTS = "scheduler/results.py"
STATE = "scheduler/state.py"
BLOCKS = "scheduler/block_manager.py"
POOLS = "scheduler/block_pools.py"
STEP = "step.py"
CACHE = "scheduler/prefix_cache.py"
SHARES = "scheduler/cache_shares.py"
QUEUE = "scheduler/queue.py"
FAIR = "scheduler/policies/fair.py"
MACRO = "scheduler/macro.py"
BEAMS = "scheduler/beams.py"
STEP_TIMES = "speculation/step_times.py"
CONTROLLER = "speculation/controller.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str


MUTANTS = (
    # ------------------------------------------------------------ planning
    Mutant(
        "readmits a request before its token is known",
        SCHEDULER,
        "if request.num_known_tokens < len(request.token_ids):",
        "if False:",
    ),
    Mutant(
        "computes the last token, which nobody reads",
        SCHEDULER,
        "room = min(step.budget, row.num_computable_tokens - start)",
        "room = min(step.budget, row.num_computable_tokens + 1 - start)",
    ),
    Mutant(
        "samples from an unfinished prompt",
        SCHEDULER,
        "samples = start + num_tokens - num_draft == len(row.token_ids)",
        "samples = True",
    ),
    Mutant(
        "pipeline: a token is there in the very next step",
        SCHEDULER,
        "step.step_id - row.sampling_step >= self.stages",
        "True",
    ),
    Mutant(
        "pipeline: a token is there one step too early",
        SCHEDULER,
        "step.step_id - row.sampling_step >= self.stages",
        "step.step_id - row.sampling_step >= self.stages - 1",
    ),
    Mutant(
        "pipeline: the first step takes all decodes",
        SCHEDULER,
        "left, found = -(-len(line) // self.stages), []",
        "left, found = len(line), []",
    ),
    Mutant(
        "pipeline: a step that reads the end of a prompt is not known to sample",
        SCHEDULER,
        "                if entry.samples:\n                    row.sampling_step",
        "                if entry.num_tokens == 1:\n                    row.sampling_step",
    ),
    Mutant("does not count the budget", SCHEDULER, "step.budget -= num_tokens", "pass"),
    Mutant(
        "plans as if all drafts failed",
        SCHEDULER,
        "row.token_ids += [UNKNOWN_TOKEN] * (num_draft + 1)",
        "row.token_ids += [UNKNOWN_TOKEN]",
    ),
    Mutant(
        "drafts take the place of the token itself",
        SCHEDULER,
        "num_draft = max(0, min(num_wanted, room - 1))",
        "num_draft = max(0, min(num_wanted, room))",
    ),
    Mutant(
        "preempts although enough is coming back",
        SCHEDULER,
        "coming = blocks.num_deferred_blocks + self._num_leaving(pool)",
        "coming = 0",
    ),
    Mutant(
        "preempts what this very step computes",
        SCHEDULER,
        "return request in self.running and request.request_id not in step.num_planned",
        "return request in self.running",
    ),
    Mutant(
        "preempts the first in line",
        SCHEDULER,
        "behind = reversed(self.running.in_order(step.now))",
        "behind = iter(self.running.in_order(step.now))",
    ),
    Mutant(
        "preempts the same request for ever",
        SCHEDULER,
        "if not self.state.num_exempt:",
        "if True:",
    ),
    Mutant(
        "takes over a prompt that is still being computed",
        SCHEDULER,
        "if not has_prompt(parent, parent.num_computed_tokens - planned):",
        "if not has_prompt(parent, parent.num_computed_tokens):",
    ),
    Mutant(
        "forgets to wake a fork whose parent is computed in this step",
        SCHEDULER,
        "self.state.forks.wake(parent)  # this very step computes it",
        "pass",
    ),
    Mutant(
        "beams take seats that are not there",
        STATE,
        "if ended.block_ids and len(self.running) < self.max_num_seqs and",
        "if ended.block_ids and",
    ),
    Mutant(
        "there are more requests than seats",
        SCHEDULER,
        "if len(self.running) >= self.max_num_seqs:",
        "if False:",
    ),
    Mutant(
        "admits what has no room",
        SCHEDULER,
        "if not blocks.fits(prefix, len(request.token_ids) - prefix.num_tokens, chunk):",
        "if False:",
    ),
    Mutant(
        "asks for a request that found no room only once",
        SCHEDULER,
        "return not is_same or any(map(gt, self.blocks.free_blocks, free))",
        "return who is not request",
    ),
    Mutant(
        "prompt log-probabilities skip what is cached",
        SCHEDULER,
        "limit = 0  # each prompt position is to be computed",
        "pass",
    ),
    Mutant(
        "serves two requests with one id",
        SCHEDULER,
        "if request.request_id in self.requests or request.request_id in self.beams:",
        "if False:",
    ),
    Mutant(
        "takes what can never be served",
        "scheduler/admission.py",
        "if self.blocks_needed(request, request.sampling.beam_width) > self.blocks.num_blocks:",
        "if False:",
    ),
    Mutant(
        "a fault spares those that run behind it",
        SCHEDULER,
        "for plan, in_flight in self._in_flight.values():",
        "for plan, in_flight in list(self._in_flight.values())[:1]:",
    ),
    Mutant(
        "forgets rows that a failed plan was to close",
        SCHEDULER,
        "state.finished += (*plan.preempted, *plan.finished)",
        "pass",
    ),
    Mutant(
        "cuts a prompt that is to be computed whole",
        SCHEDULER,
        "if not self.chunked_prefill and num_tokens > step.budget:",
        "if False:",
    ),
    # ------------------------------------------------------------ the usual decode
    Mutant(
        "the usual decode writes where it has no block",
        SCHEDULER,
        "is_full = end > row.num_tokens_with_slots",
        "is_full = num_draft > 0 and end > row.num_tokens_with_slots",
    ),
    Mutant(
        "the usual decode passes over chunks of prompts",
        SCHEDULER,
        "if len(tokens) != start + 1:",
        "if len(tokens) != start + 1 and step.num_draft_tokens:",
    ),
    Mutant(
        "the usual decode does not count the budget",
        SCHEDULER,
        "budget -= num_draft + 1",
        "budget -= num_draft",
    ),
    Mutant(
        "drafts are taken for usual decodes",
        SCHEDULER,
        "if drafts and row.has_drafts:",
        "if False:",
    ),
    Mutant(
        "drafts are checked where there is no block for them",
        SCHEDULER,
        "is_full = end > row.num_tokens_with_slots",
        "is_full = start >= row.num_tokens_with_slots",
    ),
    Mutant(
        "drafts are checked beyond the budget",
        SCHEDULER,
        "if num_draft >= budget or (is_full and",
        "if (is_full and",
    ),
    Mutant(
        "one block is said to be room for any drafts",
        BLOCKS,
        "and end <= min(room + self.block_size, request.num_computable_tokens)",
        "",
    ),
    Mutant(
        "a block is opened behind one that is not its own",
        BLOCKS,
        "request.num_tokens_with_slots == room >= request.num_computed_tokens",
        "room >= request.num_computed_tokens",
    ),
    Mutant(
        "takes a block that is not there",
        BLOCKS,
        "            and self.num_free_blocks >= len(self.windows)\n",
        "",
    ),
    Mutant(
        "columns do not say which decodes are given blocks",
        SCHEDULER,
        "step.opened.append(len(scheduled))",
        "pass",
    ),
    Mutant(
        "checks of drafts do not count the budget",
        SCHEDULER,
        "budget -= num_draft + 1",
        "budget -= 1",
    ),
    Mutant(
        "checks of drafts are said to be decodes",
        SCHEDULER,
        "tokens += [UNKNOWN_TOKEN] * num_draft\n                step.only_decodes = False",
        "tokens += [UNKNOWN_TOKEN] * num_draft",
    ),
    Mutant(
        "checks of drafts pass over chunks of prompts",
        SCHEDULER,
        "if len(tokens) != start + 1:",
        "if len(tokens) != start + 1 and not step.num_draft_tokens:",
    ),
    Mutant(
        "usual results stand where no draft was wrong",
        RESULTS,
        "first = row.num_done_tokens + 1  #",
        "first = entry.start + 1  #",
    ),
    Mutant(
        "drafts that a usual step has found are left aside",
        RESULTS,
        "row.draft_token_ids = drafts.get(row.request_id, ())\n",
        "row.draft_token_ids = ()\n",
    ),
    Mutant(
        "results of drafts forget that a block is full",
        RESULTS,
        "if has_windows or done // size > row.num_published_blocks:",
        "if has_windows:",
    ),
    Mutant(
        "results of drafts forget what leaves a window",
        RESULTS,
        "if has_windows or done // size > row.num_published_blocks:",
        "if done // size > row.num_published_blocks:",
    ),
    Mutant(
        "beams take blocks that are kept for one that was preempted too often",
        STATE,
        "len(self.running) < self.max_num_seqs and not self.num_exempt:",
        "len(self.running) < self.max_num_seqs:",
    ),
    Mutant(
        "blocks published early have no hash when they are looked for",
        BLOCKS,
        "self.hash_blocks()\n        return self._cache.match(",
        "return self._cache.match(",
    ),
    Mutant(
        "a parent writes where its fork reads",
        BLOCKS,
        "parent.num_tokens_with_slots = 0  # it may write to one of them next",
        "pass",
    ),
    Mutant(
        "there is room for the last token, which nobody reads",
        BLOCKS,
        "request.num_tokens_with_slots = min(room, request.num_computable_tokens)",
        "request.num_tokens_with_slots = room",
    ),
    Mutant(
        "room is a token too long",
        BLOCKS,
        "room = -(-end // self.block_size) * self.block_size",
        "room = -(-end // self.block_size) * self.block_size + 1",
    ),
    Mutant(
        "prompts are said to be decodes",
        SCHEDULER,
        "or copies:\n            step.only_decodes = False",
        "or copies:\n            pass",
    ),
    Mutant(
        "usual results go on behind a stop token",
        RESULTS,
        "and token_id not in row.stop_token_ids:",
        ":",
    ),
    Mutant(
        "tokens with drafts go on behind a stop token",
        RESULTS,
        "and row.stop_token_ids.isdisjoint(new):",
        ":",
    ),
    Mutant(
        "usual results pass over the end of an answer",
        RESULTS,
        "if first < row.num_computable_tokens and token_id",
        "if token_id",
    ),
    Mutant(
        "usual results forget that a block is full",
        RESULTS,
        "if first % size in edges:",
        "if False:",
    ),
    Mutant(
        "usual results count for the next life",
        RESULTS,
        "if row.epoch == epoch and row.has_output and entry.samples:",
        "if row.has_output and entry.samples:",
    ),
    Mutant(
        "results of drafts pass over the end of an answer",
        RESULTS,
        "if done < row.num_computable_tokens and row.stop",
        "if row.stop",
    ),
    Mutant(
        "first tokens are usual results",
        RESULTS,
        "if row.epoch == epoch and row.has_output and entry.samples:",
        "if row.epoch == epoch and entry.samples:",
    ),
    Mutant(
        "the end of a prompt is taken for a result of drafts",
        RESULTS,
        "elif entry.num_tokens == entry.num_draft + 1:",
        "else:",
    ),
    Mutant(
        "a list of running requests changes under its reader",
        QUEUE,
        "line = self._lines[lane] = self._lines[lane].copy()\n            del",
        "line = self._lines[lane]\n            del",
    ),
    # ------------------------------------------------------------ many steps at once
    Mutant(
        "passes over the admission of somebody",
        MACRO,
        "if size < scheduler.max_num_batched_tokens and scheduler.may_admit():",
        "if False:",
    ),
    Mutant(
        "passes over the end of an answer",
        MACRO,
        "last = 0 if self.scheduler.in_flight else 1",
        "last = 0",
    ),
    Mutant(
        "passes over a preemption",
        MACRO,
        "or self._num_to_take(rows, most) <= free",
        "or True",
    ),
    Mutant(
        "passes over a window's edge",
        MACRO,
        "offsets = {(window - 1) % size",
        "offsets = {window % size",
    ),
    Mutant(
        "forgets what a prompt in flight has filled",
        MACRO,
        "events.append((1, True, n))",
        "pass",
    ),
    # ------------------------------------------------------------ results
    Mutant(
        "rejected drafts stay computed",
        RESULTS,
        "request.num_computed_tokens -= num_rejected",
        "pass",
    ),
    Mutant(
        "rejected drafts count as done",
        RESULTS,
        "request.num_done_tokens += entry.num_tokens - num_rejected",
        "request.num_done_tokens += entry.num_tokens",
    ),
    Mutant(
        "a late result counts for the next life",
        RESULTS,
        "if request.epoch == epoch:",
        "if True:",
    ),
    Mutant(
        "a beam that was preempted hands over what it has lost",
        STATE,
        "if ended.block_ids and",
        "if",
    ),
    Mutant("gives tokens to the dead", RESULTS, "if row.is_ended:", "if False:"),
    Mutant(
        "tokens behind a stop token are delivered",
        RESULTS,
        "return token_ids[: i + 1], FinishReason.STOP",
        "return token_ids, FinishReason.STOP",
    ),
    Mutant(
        "prompt positions are delivered twice",
        RESULTS,
        "got[max(0, request.num_prompt_logprobs - entry.start) :]",
        "got[0:]",
    ),
    Mutant(
        "what went wrong can still be found",
        RESULTS,
        "self.state.blocks.forget(row)",
        "pass",
    ),
    # ------------------------------------------------------------ state, queue
    Mutant(
        "forgets to close rows",
        STATE,
        "names.append(request.request_id)",
        "pass",
    ),
    Mutant(
        "an older life is not told from a newer one",
        STATE,
        "request.epoch += 1",
        "request.epoch += 0",
    ),
    Mutant(
        "blocks of a step in flight are free at once",
        STATE,
        "self.blocks.free(request, self.last_planned)",
        "self.blocks.free(request, 0)",
    ),
    Mutant(
        "beams are chosen from old reports",
        BEAMS,
        "self._reports.clear()",
        "pass",
    ),
    Mutant(
        "beams that are dropped keep their blocks",
        STATE,
        "for request in self._ended:\n            self._free(request)",
        "for request in self._ended:\n            pass",
    ),
    Mutant(
        "beams go on with the tokens of another",
        BEAMS,
        "(*before[parent].prompt_token_ids, hypothesis",
        "(*before[0].prompt_token_ids, hypothesis",
    ),
    Mutant("forks of the dead sleep on", STATE, "self.forks.wake(request)", "pass"),
    Mutant(
        "a fork under another salt shares blocks",
        STATE,
        "and child.cache_salt == parent.cache_salt",
        "",
    ),
    Mutant(
        "a fork shares another prompt",
        STATE,
        "and child.prompt_token_ids == parent.prompt_token_ids",
        "",
    ),
    Mutant(
        "a fork takes over all but the last two tokens as if it were one",
        STATE,
        "return num_computed >= len(parent.prompt_token_ids) - 1",
        "return num_computed >= len(parent.prompt_token_ids) - 2",
    ),
    Mutant(
        "the oldest is passed over for ever",
        QUEUE,
        "if self._num_overtaken >= self.starvation_limit:",
        "if False:",
    ),
    # ------------------------------------------------------------ blocks
    Mutant(
        "a shared block is not counted",
        BLOCKS,
        "                del self._deferred[block]\n        self._ref_count[block] += 1",
        "                del self._deferred[block]\n        self._ref_count[block] = 1",
    ),
    Mutant(
        "an evicted block keeps its hash",
        BLOCKS,
        "                self._cache.forget(taken[-1])\n",
        "",
    ),
    Mutant(
        "reuses blocks that a step in flight may touch",
        BLOCKS,
        "if last_step <= last_completed:",
        "if True:",
    ),
    Mutant(
        "deferred blocks come back one step early",
        BLOCKS,
        "if last_step > step_id:",
        "if last_step > step_id + 1:",
    ),
    Mutant(
        "writes into a shared block",
        BLOCKS,
        "if self._ref_count[block] > 1 or self._cache.names(block):",
        "if self._cache.names(block):",
    ),
    Mutant(
        "writes into a published block",
        BLOCKS,
        "if self._ref_count[block] > 1 or self._cache.names(block):",
        "if self._ref_count[block] > 1:",
    ),
    Mutant(
        "a copied block is gone before it is read",
        BLOCKS,
        "self._release((source,), step_id)",
        "self._release((source,), 0)",
    ),
    Mutant(
        "publishes half-filled blocks",
        BLOCKS,
        "full = request.num_done_tokens // self.block_size",
        "full = _ceil_div(request.num_done_tokens, self.block_size)",
    ),
    Mutant(
        "publishes what no step has written yet",
        BLOCKS,
        "full = request.num_done_tokens // self.block_size",
        "full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size",
    ),
    Mutant(
        "gives back what the window still shows",
        BLOCKS,
        "bound = first_needed(self.windows[g], request.num_done_tokens) // self.block_size\n"
        "            if bound > dropped",
        "bound = first_needed(self.windows[g], request.num_computed_tokens) // self.block_size\n"
        "            if bound > dropped",
    ),
    Mutant(
        "shares what the parent's window has passed",
        BLOCKS,
        "if parent.num_dropped_blocks[g] > first and first < end:",
        "if False:",
    ),
    Mutant(
        "a window needs no more than its own tokens",
        BLOCKS,
        "(span + block_size - 2) // block_size + 1",
        "span // block_size",
    ),
    Mutant(
        "beams need no blocks of their own",
        BLOCKS,
        "common = (width - 1) * (num_prompt // block_size)",
        "common = (width - 1) * (num_tokens // block_size)",
    ),
    Mutant(
        "forgets that windows give blocks back",
        BLOCKS,
        "total += max(0, bound - request.num_dropped_blocks[g])",
        "total += 0",
    ),
    # ------------------------------------------------------------ waves
    Mutant(
        "waves: room is made by rows of any pool",
        SCHEDULER,
        "here = (v for _, _, v in behind if v.pool == pool)",
        "here = (v for _, _, v in behind)",
    ),
    Mutant(
        "waves: a fork shares blocks of another pool",
        SCHEDULER,
        "request.pool = parent.pool",
        "pass",
    ),
    Mutant(
        "waves: a beam goes on in another pool",
        STATE,
        "request.pool = ended.pool",
        "pass",
    ),
    Mutant(
        "waves: a row is not known to be of its pool",
        SCHEDULER,
        "row.sampling, tables, row.pool)",
        "row.sampling, tables)",
    ),
    Mutant(
        "waves: what a request may ask for is what all pools have",
        SCHEDULER,
        "blocks.pools[0], max_num_batched_tokens",
        "blocks, max_num_batched_tokens",
    ),
    Mutant(
        "waves: prefixes are looked for in the pool that is chosen last",
        POOLS,
        "return found[request.pool]",
        "return found[-1]",
    ),
    Mutant(
        "waves: all requests go to one pool",
        POOLS,
        "return (not has_room, to_read, len(rows), -pool.num_free_blocks)",
        "return (0,)",
    ),
    Mutant(
        "waves: a pool without room is as good as another",
        POOLS,
        "return (not has_room, to_read,",
        "return (to_read,",
    ),
    Mutant(
        "waves: only the first pool's steps are over",
        POOLS,
        "            pool.complete(step_id)",
        "            self.pools[0].complete(step_id)",
    ),
    Mutant(
        "waves: after a fault only the first pool withdraws its blocks",
        POOLS,
        "            pool.withdraw_early(row_id)",
        "            self.pools[0].withdraw_early(row_id)",
    ),
    Mutant(
        "waves: rows close on every device but their own",
        STEP,
        "for one in every if pool is None else (pool,):",
        "for one in every if pool is None else {*every} - {pool}:",
    ),
    Mutant(
        "waves: columns name the rows that open by their places in the whole step",
        STEP,
        "opened = [places[pool][at] for at",
        "opened = [at for at",
    ),
    Mutant(
        "waves: a step is over when the first device has spoken",
        STEP,
        "return len(self._found.get(step_id, ())) >= number",
        "return bool(self._found.get(step_id, ()))",
    ),
    Mutant(
        "waves: only tokens are taken from all devices",
        STEP,
        "for name in StepResult.__struct_fields__:",
        'for name in ("token_ids",):',
    ),
    # ------------------------------------------------------------ dead and late ranks
    Mutant(
        "ranks: a step that a rank did not live to see is a failed step",
        ENGINE,
        "        except EngineFault as fault:\n            return self._fail(step",
        "        except Exception as fault:\n            return self._fail(step",
    ),
    Mutant(
        "ranks: one that is found dead behind a failed step is forgotten",
        ENGINE,
        "            except EngineFault as fault:\n                say(",
        "            except Exception as fault:\n                say(",
    ),
    Mutant(
        "ranks: what a late one says counts for the newest step",
        STEP,
        "self._found.setdefault(step_id, {})[device]",
        "self._found.setdefault(max(self._found, default=step_id), {})[device]",
    ),
    Mutant(
        "ranks: what a late one says replaces what others have said",
        STEP,
        "self._found.setdefault(step_id, {})[device]",
        "self._found.setdefault(step_id, {})[0]",
    ),
    Mutant(
        "ranks: a late one's part of a step is left out",
        STEP,
        "return len(self._found.get(step_id, ())) >= number",
        "return len(self._found.get(step_id, ())) >= max(1, number - 1)",
    ),
    # ------------------------------------------------------------ shares of the cache
    Mutant(
        "shares: a hit leaves a block with its first user",
        SHARES,
        "holder, old = self._used_by(tenant), self._holder_of[block]",
        "old = self._holder_of[block]\n        holder = old or self._used_by(tenant)",
    ),
    Mutant(
        "shares: the newest tenant is the only one",
        SHARES,
        "self._total_weight += holder.weight",
        "self._total_weight = holder.weight",
    ),
    Mutant(
        "shares: what is taken from a tenant still counts",
        SHARES,
        "self._count(holder, -1)",
        "pass",
    ),
    Mutant(
        "shares: any tenant that is over its share gives, not the one that is most",
        SHARES,
        "worst, most = holder, holder.num_blocks / holder.weight",
        "worst = holder",
    ),
    Mutant(
        "shares: who stays away keeps its share",
        SHARES,
        "            if idle.evictable:",
        "            if False:",
    ),
    Mutant(
        "shares: weights are ignored",
        SHARES,
        "_Holder(tenant, self._weights.get(tenant, 1))",
        "_Holder(tenant, 1)",
    ),
    Mutant(
        "shares: nobody counts what was there before the second tenant came",
        BLOCKS,
        "            if block not in plain:",
        "            if False:",
    ),
    # ------------------------------------------------------------ prefix cache
    Mutant(
        "a hit may cover every token",
        CACHE,
        "num_blocks = max(0, limit - 1) // self.block_size",
        "num_blocks = limit // self.block_size",
    ),
    Mutant(
        "the hash ignores what came before",
        CACHE,
        "parent = hashes[-1] if hashes else self._root(request.cache_salt)",
        "parent = self._root(request.cache_salt)",
    ),
    Mutant(
        "the hash ignores the salt",
        CACHE,
        "self._root(request.cache_salt)",
        'self._root(b"")',
    ),
    Mutant(
        "two blocks of one hash",
        CACHE,
        "if block and self._hash_of[block] is None and hashes[i] not in blocks:",
        "if block and self._hash_of[block] is None:",
    ),
    Mutant(
        "a window finds one token too few",
        CACHE,
        "return 0 if window is None else max(0, position - window + 1)",
        "return 0 if window is None else max(0, position - window + 2)",
    ),
    Mutant(
        "a gap in a window is overlooked",
        CACHE,
        "for i in range(length - 1, first - 1, -1)",
        "for i in range(length - 1, first, -1)",
    ),
    # ------------------------------------------------------------ beams
    Mutant(
        "a search goes on before all beams have reported",
        BEAMS,
        "return len(self._reports) == len(self.beams)",
        "return True",
    ),
    Mutant(
        "beams of a search that failed go on",
        BEAMS,
        "            if not beam.is_ended:\n",
        "            if False:\n",
    ),
    Mutant(
        "beams mix up their hashes",
        STATE,
        "request.block_hashes = list(ended.block_hashes)",
        "request.block_hashes = ended.block_hashes",
    ),
    Mutant(
        "any candidate may finish, however unlikely",
        BEAMS,
        "for c in candidates[: self.width] if self._ends(c, length)",
        "for c in candidates if self._ends(c, length)",
    ),
    Mutant(
        "finished beams are not normalised by length",
        BEAMS,
        "self._grow(c, c.score / penalty, tops)",
        "self._grow(c, c.score, tops)",
    ),
    Mutant(
        "early stopping is ignored",
        BEAMS,
        "return not self.sampling.early_stopping and",
        "return",
    ),
    Mutant(
        "beams report too few candidates",
        BEAMS,
        "return sampling.beam_width + max(",
        "return max(",
    ),
    # ------------------------------------------------------------ engine
    Mutant(
        "completes steps out of order", ENGINE, "self._in_flight.popleft()", "self._in_flight.pop()"
    ),
    Mutant(
        "does not wait for steps behind a failed one",
        ENGINE,
        "behind = list(self._in_flight)",
        "behind: list[_Launched] = []",
    ),
    Mutant(
        "one step more in flight than allowed",
        ENGINE,
        "if len(self._in_flight) >= self.max_in_flight:\n            return None",
        "if len(self._in_flight) > self.max_in_flight:\n            return None",
    ),
    # ------------------------------------------------------------ how much is drafted
    Mutant(
        "drafts: learns from steps in which many end",
        STEP_TIMES,
        "return abs(one[2] - other[2]) * STEADY <= one[2]",
        "return True",
    ),
    Mutant(
        "drafts: learns from the first step of a kind behind other steps, though steps overlap",
        STEP_TIMES,
        "if last is not None and _is_like(last, before) and _is_like(last, this):",
        "if last is not None and _is_like(last, this):",
    ),
    Mutant(
        "drafts: what is new while the machine is slow stays slow",
        STEP_TIMES,
        "before.value /= change ** (share * other)",
        "pass",
    ),
    Mutant(
        "drafts: what is new makes up for a slowdown that is wrong",
        STEP_TIMES,
        "near * _within(value / seen.slowdown / near, CLOSE), 1",
        "value / seen.slowdown, 1",
    ),
    Mutant(
        "drafts: a stall is the new slowdown",
        STEP_TIMES,
        "value = median_low(seen.run)",
        "value = max(seen.run)",
    ),
    Mutant(
        "drafts: what is known well follows each swing",
        STEP_TIMES,
        "limit = CLOSE if max(mine, other) > UNCERTAIN else LIMIT",
        "limit = CLOSE",
    ),
    Mutant(
        "drafts: many comparisons are worth no more than one",
        STEP_TIMES,
        "return max(LEAST_WEIGHT, 1 / (self.num_compared + 1))",
        "return 1.0",
    ),
    Mutant(
        "drafts: what was tried once is never tried again",
        STEP_TIMES,
        "self.num_steps - ratio.last < holds << ratio.num_compared",
        "True",
    ),
    Mutant(
        "drafts: what was never tried is as far from its price as it looks",
        STEP_TIMES,
        "found[k] = UNTRIED * (best if k else min(best, price))",
        "found[k] = 2 * best",
    ),
    Mutant(
        "drafts: a slowdown that has changed is never heard of",
        STEP_TIMES,
        "elif seen.length > FIRST:",
        "elif seen.length < 0:",
    ),
    Mutant(
        "drafts: a row of which little was accepted never gets better",
        CONTROLLER,
        "            if num_drafts:\n                row.add(",
        "            if num_drafts and row.accepted >= 0.04 * row.verified:\n"
        "                row.add(",
    ),
    Mutant(
        "drafts: one step of many rows is all that is known of them",
        CONTROLLER,
        "kept = max(self._rows_memory ** sum(results.values()), self._steps_memory)",
        "kept = self._rows_memory ** sum(results.values())",
    ),
    Mutant(
        "drafts: what was accepted is never forgotten",
        CONTROLLER,
        "            seen[1] *= kept\n",
        "",
    ),
    Mutant(
        "drafts: how the last answers ended is how all drafts are",
        CONTROLLER,
        "(0.999, 127 / 128)",
        "(0.999, 15 / 16)",
    ),
    Mutant(
        "drafts: what is looked up is remembered as long as what is drafted",
        CONTROLLER,
        "(0.995, 15 / 16) if is_looked_up",
        "(0.999, 127 / 128) if is_looked_up",
    ),
    Mutant(
        "drafts: a choice of many rows holds no longer than one of few",
        CONTROLLER,
        "self._held_for = HELD + len(decoding) // ROWS_PER_STEP",
        "self._held_for = 1",
    ),
    Mutant(
        "drafts: a choice of prompt lookup that stays holds no longer",
        CONTROLLER,
        "self._held_for = min(2 * self._held_for, LONGEST_HELD)",
        "self._held_for = HELD",
    ),
    Mutant(
        "drafts: all that many rows brought is learned from at once",
        CONTROLLER,
        "self._later(self._add_result, verified, len(verified))",
        "self._later(self._add_result, verified)",
    ),
    Mutant(
        "drafts: each choice looks at the same rows",
        CONTROLLER,
        "decoding[self._num_choices % stride :: stride]",
        "decoding[::stride]",
    ),
    Mutant(
        "drafts: what a row's drafts were is never forgotten",
        CONTROLLER,
        "kept = ROW_MEMORY**verified",
        "kept = 1.0",
    ),
    Mutant(
        "drafts: that a copy begins or ends is no reason to choose",
        CONTROLLER,
        "self._holds, self._held_for = min(self._holds, HELD), HELD",
        "pass",
    ),
    Mutant(
        "drafts: prompt lookup is expected to find something in every step",
        CONTROLLER,
        "found = self.acceptance.found[num_found > 0]",
        "found = 1.0",
    ),
    Mutant(
        "drafts: the chance of a position is that of all positions",
        CONTROLLER,
        "self._chances.append(chance)",
        "self._chances.append(self.rate)",
    ),
    Mutant(
        "drafts: a step that ran on behind an answer's end says how good they are",
        SCHEDULER,
        "if ended or plan.step_id <= self._planned_at_end:",
        "if ended:",
    ),
    Mutant(
        "drafts: so do those behind the stop token",
        RESULTS,
        "num_taken = len(output.new_token_ids)",
        "num_taken = num_verified + 1",
    ),
    Mutant(
        "drafts: so does one that was given up",
        SCHEDULER,
        "self._forget(request_id)\n        self.state.end(request)",
        "self.state.end(request)",
    ),
    Mutant(
        "cost: all experts are read, however few tokens choose some",
        "cost/pricer.py",
        "return 1.0 if p == 1.0 else (1.0 - (1.0 - p) ** n) / p",
        "return 1.0",
    ),
    Mutant(
        "drafts: a check costs as much behind any context",
        "cost/step_features.py",
        "pairs = sum(map(mul, new, before)) + (sum(map(mul, new, new)) + sum(new)) // 2",
        "pairs = (sum(map(mul, new, new)) + sum(new)) // 2",
    ),
    # ------------------------------------------------------------ tenants
    Mutant(
        "tenants: idle time is credit",
        FAIR,
        "lanes[lane].tag, lanes[lane].is_fresh = max(lanes[lane].tag, floor), True",
        "lanes[lane].is_fresh = True",
    ),
    Mutant("tenants: weights are ignored", FAIR, "seconds / lane.weight", "seconds"),
    Mutant(
        "tenants: eight answers count as one",
        FAIR,
        "        for entry, row, _ in in_flight:\n",
        "        firsts = [f for f in in_flight if f[1].fork_of is None]\n"
        "        for entry, row, _ in firsts or in_flight:\n",
    ),
    Mutant(
        "tenants: prompts are free",
        FAIR,
        "tokens[row.tenant] += entry.num_tokens",
        "tokens[row.tenant] += entry.samples",
    ),
    Mutant(
        "tenants: nobody makes way",
        SCHEDULER,
        "self.state.preempt(other, now)",
        "pass",
    ),
    Mutant(
        "tenants: who holds its share takes more",
        FAIR,
        "if has and has + needs > mine.weight / total:",
        "if False:",
    ),
    Mutant(
        "tenants: a prompt that is being read goes before whoever waits",
        SCHEDULER,
        "if self._has_lanes:  # who waits may be before it",
        "if False:",
    ),
    Mutant(
        "tenants: who has left is remembered for ever",
        FAIR,
        "if not lane.num_open and is_even(lane):",
        "if False:",
    ),
)

NO_BUG = Mutant("nothing", ENGINE, "class Engine:", "class Engine:")


def plant(mutant: Mutant, scratch: Path) -> None:
    shutil.copytree(
        ROOT / "ridgeline", scratch / "ridgeline", ignore=shutil.ignore_patterns("__pycache__")
    )
    (scratch / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "simulate_core.py", scratch / "tools")
    shutil.copy(ROOT / "pyproject.toml", scratch)
    shutil.copytree(ROOT / "tests" / "scheduler", scratch / "tests" / "scheduler")
    for name in COPIED_TESTS:
        (scratch / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, scratch / "tests" / name)
    target = scratch / "ridgeline" / mutant.file
    text = target.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.what}: its text occurs {text.count(mutant.old)} times")
    target.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def succeeds(command: list[str], folder: Path) -> bool:
    environment = os.environ | {"RIDGELINE_SIM_STEPS": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        run = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def who_notices(mutant: Mutant) -> str:
    """ "oracle", "tests" or "" when it survives."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        plant(mutant, scratch)
        oracle = ["tools/simulate_core.py", "--steps", str(ORACLE_STEPS), "--processes", "1"]
        if not succeeds(oracle, scratch):
            return "oracle"
        tests = ["-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", "tests"]
        return "" if succeeds(tests, scratch) else "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="bugs whose description holds these words")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.only in mutant.what]
    start, survivors = time.monotonic(), 0
    if witness := who_notices(NO_BUG):
        print(f"the {witness} fails without any bug: mend that first")
        return 1
    with ThreadPoolExecutor(asked.processes) as pool:
        for mutant, witness in zip(chosen, pool.map(who_notices, chosen), strict=True):
            survivors += not witness
            verdict = f"caught by the {witness}" if witness else "SURVIVED"
            print(f"{verdict:16} {mutant.file}: {mutant.what}", flush=True)
    caught = len(chosen) - survivors
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - start:.0f} s")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main())

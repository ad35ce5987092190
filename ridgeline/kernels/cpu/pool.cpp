#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Task = void (*)(void*, int, int);

constexpr int MAX_THREADS = 256;
constexpr int MAX_TASKS = 1 << 20;  // of one ticket
constexpr int PAUSES = 64;          // between two looks at the clock
constexpr auto PURE_SPIN = std::chrono::microseconds(50);  // then the core is offered to others

// generation | tasks | next task, 24 + 20 + 20 bits in one word: whoever takes a task knows that it
// belongs to the call whose function it then reads, as that call cannot end without this task.
constexpr int NEXT_BITS = 20, TASK_BITS = 20;
constexpr uint64_t NEXT_MASK = (1ull << NEXT_BITS) - 1;
constexpr uint64_t TASK_MASK = (1ull << TASK_BITS) - 1;

struct alignas(64) Pool {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int> left{0};
  alignas(64) std::atomic<uint32_t> calls{0};  // the word that sleepers wait on
  std::atomic<int> sleepers{0};
  alignas(64) std::atomic<Task> function{nullptr};
  std::atomic<void*> argument{nullptr};
  std::atomic<int> members{1};  // workers with a number below it take part
  std::atomic<int> spin_us{200};
  std::mutex callers;
  uint64_t generation = 0;
  int started = 0;  // workers that exist
};

Pool* pool = nullptr;
std::atomic<int> wanted{1};
thread_local int inside = -1;  // the number of this thread while it runs a task

void pause() { __builtin_ia32_pause(); }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr,
                 0);
}

void work(Pool& p, int thread) {
  for (;;) {
    uint64_t seen = p.ticket.load(std::memory_order_acquire);
    uint64_t next = seen & NEXT_MASK, tasks = (seen >> NEXT_BITS) & TASK_MASK;
    if (next >= tasks) return;
    if (!p.ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    Task f = p.function.load(std::memory_order_relaxed);
    void* arg = p.argument.load(std::memory_order_relaxed);
    inside = thread;
    f(arg, int(next), thread);
    inside = -1;
    p.left.fetch_sub(1, std::memory_order_release);
  }
}

void wait_for_call(Pool& p, uint32_t known) {
  auto begin = Clock::now();
  auto limit = std::chrono::microseconds(p.spin_us.load(std::memory_order_relaxed));
  for (;;) {
    for (int i = 0; i < PAUSES; ++i) {
      if (p.calls.load(std::memory_order_acquire) != known) return;
      pause();
    }
    auto spent = Clock::now() - begin;
    if (spent >= limit) break;
    if (spent >= PURE_SPIN) sched_yield();
  }
  p.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (p.calls.load(std::memory_order_seq_cst) == known)
    futex(&p.calls, FUTEX_WAIT_PRIVATE, known);
  p.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void worker(Pool* p, int thread, uint32_t known) {
  for (;;) {
    wait_for_call(*p, known);
    known = p->calls.load(std::memory_order_acquire);
    if (thread < p->members.load(std::memory_order_acquire)) work(*p, thread);
  }
}

void forget_after_fork() { pool = nullptr; }  // its threads are the parent's

Pool& the_pool() {
  static std::mutex making;
  std::lock_guard<std::mutex> lock(making);
  if (pool == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
    (void)registered;
    pool = new Pool;  // never freed: workers may still look at it while the process ends
  }
  return *pool;
}

void hire(Pool& p) {
  int threads = wanted.load(std::memory_order_relaxed);
  while (p.started < threads - 1) {
    try {
      std::thread(worker, &p, p.started + 1, p.calls.load()).detach();
    } catch (...) {
      threads = p.started + 1;  // the system gives no more threads: work with those there are
      break;
    }
    ++p.started;
  }
  p.members.store(threads, std::memory_order_release);
}

void run_alone(int begin, int end, Task f, void* arg, int thread) {
  for (int task = begin; task < end; ++task) f(arg, task, thread);
}

void run_together(Pool& p, int begin, int end, Task f, void* arg) {
  struct Shifted {
    Task f;
    void* arg;
    int begin;
  } shifted{f, arg, begin};
  auto call = [](void* raw, int task, int thread) {
    auto* s = static_cast<Shifted*>(raw);
    s->f(s->arg, s->begin + task, thread);
  };
  p.function.store(begin ? Task(call) : f, std::memory_order_relaxed);
  p.argument.store(begin ? &shifted : arg, std::memory_order_relaxed);
  p.left.store(end - begin, std::memory_order_relaxed);
  uint64_t tasks = uint64_t(end - begin);
  ++p.generation;
  p.ticket.store((p.generation << (NEXT_BITS + TASK_BITS)) | (tasks << NEXT_BITS),
                 std::memory_order_release);
  p.calls.fetch_add(1, std::memory_order_seq_cst);
  if (p.sleepers.load(std::memory_order_seq_cst)) futex(&p.calls, FUTEX_WAKE_PRIVATE, INT_MAX);
  work(p, 0);
  auto begin_wait = Clock::now();
  while (p.left.load(std::memory_order_acquire) > 0) {
    for (int i = 0; i < PAUSES && p.left.load(std::memory_order_acquire) > 0; ++i) pause();
    if (Clock::now() - begin_wait > PURE_SPIN) sched_yield();
  }
}

}  // namespace

RL_API void pool_run(int tasks, Task f, void* arg) {
  if (tasks <= 0) return;
  if (inside >= 0) {
    int thread = inside;
    run_alone(0, tasks, f, arg, thread);
    return;
  }
  Pool& p = the_pool();
  std::lock_guard<std::mutex> lock(p.callers);
  hire(p);
  if (tasks == 1 || p.members.load(std::memory_order_relaxed) == 1) {
    inside = 0;
    run_alone(0, tasks, f, arg, 0);
    inside = -1;
    return;
  }
  for (int begin = 0; begin < tasks; begin += MAX_TASKS - 1) {
    int rest = tasks - begin;
    run_together(p, begin, begin + (rest < MAX_TASKS - 1 ? rest : MAX_TASKS - 1), f, arg);
  }
}

RL_API void pool_set_threads(int threads) {
  if (threads < 1) threads = 1;
  wanted.store(threads > MAX_THREADS ? MAX_THREADS : threads, std::memory_order_relaxed);
}

RL_API int pool_threads() { return wanted.load(std::memory_order_relaxed); }

RL_API void pool_set_spin(int microseconds) {
  the_pool().spin_us.store(microseconds < 0 ? 0 : microseconds, std::memory_order_relaxed);
}

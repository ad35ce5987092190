// How does one call share its work between threads? A pool of spinning, then sleeping, workers.
#pragma once

#define RL_API extern "C" __attribute__((visibility("default")))

// Calls f(arg, task, thread) for every task 0 .. tasks - 1 and returns when all are done. Tasks are
// handed out in rising order, one at a time; thread is 0 (the caller) .. pool_threads() - 1. A call
// from inside a task runs its tasks right there, as that thread. Calls from several threads wait
// for each other. f must not throw.
RL_API void pool_run(int tasks, void (*f)(void*, int task, int thread), void* arg);

// How many threads take part, the caller among them; >= 1. Takes effect at the next pool_run.
RL_API void pool_set_threads(int threads);
RL_API int pool_threads();

// How long a worker spins after a call before it sleeps, in microseconds (default 200).
RL_API void pool_set_spin(int microseconds);

"""What should a step cost, and what memory does a model take? One model that everybody asks.

  hardware, catalogue/     what devices can do at best          constants   how much of it they do
  layout, precision, setup which model, spread how, in which formats
  totals, ops              a step as sums, and as operators with operations, bytes and messages
  communication, roofline  operators in seconds, and what binds them
  pricer, decode_run       the same fast: one step, and many decode steps in closed form
  memory, memory_items     the memory contract                  fit_suggestions what to change
  throughput, steady_state a server under load                  speculation drafts
  money                    dollars and watt-hours

Pure Python: no tensor library, no clock, no randomness.
"""

"""Which scheduling policies are there? Adding one is one file and one line here."""

POLICIES = {
    "fcfs": "ridgeline.scheduler.policies.fcfs:FCFS",
    "priority": "ridgeline.scheduler.policies.priority:Priority",
}

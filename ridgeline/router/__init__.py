"""Which router policies are there? Adding one is one class and one line here."""

POLICIES = {
    "random": "ridgeline.router.policies:Random",
    "least-loaded": "ridgeline.router.policies:LeastLoaded",
    "two-choices": "ridgeline.router.policies:TwoChoices",
    "prefix-aware": "ridgeline.router.policies:PrefixAware",
    "first-token": "ridgeline.router.policies:FirstToken",
}

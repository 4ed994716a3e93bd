package consumer_test

// childEnv makes the test binary a consumer process instead of a test run.
const childEnv = "POSTHASTE_CONSUMER_CHILD"

func child() int { return 0 }

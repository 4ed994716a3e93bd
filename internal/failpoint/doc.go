// Package failpoint lets tests end or freeze a process before and after each step that somebody else can see: each
// statement to Postgres, each command to Redis, each message of the replication connection.
//
// It is compiled in by the build tag failpoints alone; without it, its functions are empty, and the program has none of
// it. With it, these variables of the environment decide:
//
//   - POSTHASTE_FAILPOINT names what to do, the moment and the step, such as "kill before leadership.raise store.Adopt
//     UPDATE relay_state". kill ends the process as SIGKILL does, stop freezes it as SIGSTOP does, once.
//   - POSTHASTE_FAILPOINT_TRACE names a file, to which each step is appended when it is crossed for the first time.
//   - POSTHASTE_FAILPOINT_LOG names a file that processes share, to which each step is appended each time, as an Event.
//
// A step is named by the part of relay or poll that takes it, the driver's method which that calls, and what is sent.
package failpoint

// Event is a line of POSTHASTE_FAILPOINT_LOG. Before a step Values are the arguments of the statement or command, after
// it what Redis has answered and the error, "" for none. No row of a table is in it.
type Event struct {
	PID, Goroutine int
	Moment, Step   string
	Values         []any
}

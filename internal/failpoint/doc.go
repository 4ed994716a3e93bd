// Package failpoint lets tests end or freeze a process before and after each step that is visible outside: each
// statement to Postgres, each command to Redis, each request to NATS, each message of the replication connection.
//
// Only the build tag failpoints compiles it in; without the tag its functions are empty. These environment variables
// control it:
//
//   - POSTHASTE_FAILPOINT has an action, the moment and the step, such as "kill before leadership.raise store.Adopt
//     UPDATE relay_state". kill ends the process as SIGKILL does, stop freezes it as SIGSTOP does, once.
//   - POSTHASTE_FAILPOINT_TRACE names a file, to which each step is appended when it is crossed for the first time.
//   - POSTHASTE_FAILPOINT_LOG names a file that processes share, to which each step is appended each time, as an Event.
//
// A step's name has the part of relay or poll that takes it, the driver's method that it calls, and what is sent.
package failpoint

// Event is a line of POSTHASTE_FAILPOINT_LOG. Values before a step are the arguments of the statement or command;
// after it, they are the answer of Redis and the error, or "". Rows of tables are never included.
type Event struct {
	PID, Goroutine int
	Moment, Step   string
	Values         []any
}

// Package socket makes connections whose reads and writes cost little in a process that mostly waits.
//
// Go's own ones tell the scheduler of every system call. In a process in which nothing else runs that wakes a thread of
// the runtime, which then looks every 20 µs whether the call blocks: more than what a message costs otherwise. Calls on
// a socket that the runtime has made non-blocking never block, so those here do not tell it, and wait where Go's own
// ones do, in the poller. A connection keeps its meaning: deadlines, Close, errors.
//
// On systems other than Linux the connections are Go's own.
package socket

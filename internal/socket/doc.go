// Package socket makes connections whose reads and writes are cheap in a process that mostly waits.
//
// Go's own connections announce every system call to the scheduler. In an otherwise idle process that wakes a thread
// of the runtime, which then checks every 20 µs whether the call blocks: this costs more than the rest of a message.
// The calls here are non-blocking, so they need no announcement, and wait in the poller, as Go's own do. Deadlines,
// Close and errors work as in Go's own connections.
//
// The thread that is not woken also interrupts a goroutine that computes for more than 10 ms. It still wakes for
// timers and other system calls. So this package is for processes whose goroutines run briefly.
//
// Builds with the race detector use Go's own calls.
//
// On systems other than Linux on amd64 and arm64 the connections are Go's own.
package socket

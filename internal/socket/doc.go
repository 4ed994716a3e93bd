// Package socket makes connections whose reads and writes cost little in a process that mostly waits.
//
// Go's own ones tell the scheduler of every system call. In a process in which nothing else runs that wakes a thread of
// the runtime, which then looks every 20 µs whether the call blocks: more than what a message costs otherwise. The
// calls here say that they must not block, so they do not tell it, and wait where Go's own ones do, in the poller. A
// connection keeps its meaning: deadlines, Close, errors.
//
// The thread that is not woken is also the one that interrupts a goroutine which computes for more than 10 ms. It still
// wakes for timers and for other system calls. So this is for processes whose goroutines do little at a time.
//
// In a program that is built for the race detector the calls are Go's own, which tell it what they are before and
// behind.
//
// On systems other than Linux on amd64 and arm64 the connections are Go's own.
package socket

package app

import (
	"os"
	"runtime"
)

// OneProcessor limits Go code to one processor at a time, unless the environment sets GOMAXPROCS, and returns a
// function that undoes it. A relay mostly waits for two servers: on several processors it spends most of its time
// waking threads for goroutines that have little to do. One processor carries more than the Postgres process that
// decodes a slot, and more than a Redis that takes what the relay publishes (docs/scaling.md).
func OneProcessor() (undo func()) {
	if os.Getenv("GOMAXPROCS") != "" {
		return func() {}
	}
	before := runtime.GOMAXPROCS(1)
	return func() { runtime.GOMAXPROCS(before) }
}

package app

import (
	"os"
	"runtime"
)

// OneProcessor has the process run Go code on one processor at a time, unless the environment has GOMAXPROCS, and
// returns what takes it back. A relay mostly waits for two servers: on several processors most of what it uses is spent
// on waking threads for goroutines that have little to do. One is enough: it carries more than the process that decodes
// a slot, and than a Redis that takes what it publishes (docs/scaling.md).
func OneProcessor() (undo func()) {
	if os.Getenv("GOMAXPROCS") != "" {
		return func() {}
	}
	before := runtime.GOMAXPROCS(1)
	return func() { runtime.GOMAXPROCS(before) }
}

//go:build race

package relay

// Every eighth world has the race detector, which takes seven times as long. `make test` runs all of them without it.
func init() { worlds = 8 }

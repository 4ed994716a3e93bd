package consumer

import (
	"embed"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/*.lua
var luaFiles embed.FS

func script(name string) *redis.Script {
	b, err := luaFiles.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(err) // embedded: a missing file is a broken build
	}
	return redis.NewScript(string(b))
}

// The scripts are immutable after their creation.
var (
	groupScript   = script("group")
	takeScript    = script("take")
	holdScript    = script("hold")
	beginScript   = script("begin")
	deadScript    = script("dead")
	leaveScript   = script("leave")
	inspectScript = script("inspect")
	leaseScript   = script("lease")
	readScript    = script("read")
	retryScript   = script("retry")
	headsScript   = script("heads")
)

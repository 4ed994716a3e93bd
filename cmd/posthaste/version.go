package main

import (
	"fmt"
	"runtime"
)

// version is set by the linker.
var version = "devel"

type versionCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

func (c versionCmd) Run(e *env) error {
	return e.Result(c.JSON, map[string]string{
		"version": version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
	}, versionLine())
}

// versionLine is the version for people.
func versionLine() string {
	return fmt.Sprintf("posthaste %s (%s, %s/%s)", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

package main

import "errors"

// labCmd stands for a command that starts servers, which it cannot do on Windows.
type labCmd struct {
	Arguments []string `arg:"" optional:"" passthrough:""`
}

func (labCmd) Run() error {
	return errors.New("this command starts servers of its own: run it on Linux or macOS")
}

type (
	benchCmd         struct{ labCmd }
	demoCmd          struct{ labCmd }
	proveCmd         struct{ labCmd }
	proveConsumerCmd struct{ labCmd }
)

package main

import "errors"

// labCmd stands for a command that starts servers, which it cannot do on Windows.
type labCmd struct {
	Arguments []string `arg:"" optional:"" passthrough:""`
}

type (
	benchCmd         labCmd
	demoCmd          labCmd
	proveCmd         labCmd
	proveConsumerCmd labCmd
)

var errNoLab = errors.New("this command starts servers of its own: run it on Linux or macOS")

// Run fails.
func (benchCmd) Run() error { return errNoLab }

// Run fails.
func (demoCmd) Run() error { return errNoLab }

// Run fails.
func (proveCmd) Run() error { return errNoLab }

// Run fails.
func (proveConsumerCmd) Run() error { return errNoLab }

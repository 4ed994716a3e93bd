package main

import (
	"github.com/alecthomas/kong"

	"posthaste/internal/app"
	"posthaste/internal/cli"
)

// env is what a command runs with.
type env struct {
	cli.IO

	config app.Config
	model  *kong.Application
}

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
	// settings is the text that config was parsed from, and model the parser's.
	settings app.Settings
	model    *kong.Application
}

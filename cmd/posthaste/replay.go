package main

import (
	"context"

	"posthaste/internal/replay"
)

type replayCmd struct {
	Since   string  `placeholder:"T" help:"Events published at or after T: RFC 3339, or how long ago (90m, 24h)."`
	Until   string  `placeholder:"T" help:"Events published at or before T. Default: when the replay was begun."`
	ID      string  `placeholder:"ID" help:"The event with this id."`
	Subject *string `placeholder:"KEY" help:"Events of this aggregate id."`
	Type    string  `help:"Only events of this type."`
	Stream  string  `help:"Only events that were published to this stream, or to one of those that its type is spread over."`
	All     bool    `help:"Everything in history."`
	To      string  `placeholder:"STREAM" help:"Publish to this stream instead of the events' own."`
	Rate    string  `default:"1000/s" help:"Events per second at most; 0 for as fast as it goes."`
	DryRun  bool    `help:"Only say what would be published."`
	Restart bool    `help:"Start over instead of continuing where the same command stopped."`
	JSON    bool    `name:"json" help:"Print the result as JSON."`
}

// Run republishes events from the history.
func (c replayCmd) Run(ctx context.Context, e *env) error {
	return replay.Run(ctx, e.config, e.IO, replay.Options(c))
}

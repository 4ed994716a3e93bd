package main

import (
	"context"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/deliver"
	"posthaste/internal/tlsfile"
)

type deliverCmd struct {
	Group      string   `help:"Consumer group; a new one starts at the first entry." required:""`
	To         string   `help:"URL to which each event is POSTed." required:"" placeholder:"https://HOST/PATH"`
	Stream     []string `help:"Full stream name; may be repeated. Default: all streams with the prefix." sep:"none"`
	SecretFile string
	Ordered    bool          `help:"Keep the order per subject over all processes: one at a time reads a stream."`
	Timeout    time.Duration `help:"How long the receiver may take to answer." default:"10s"`
	CA         string        `name:"ca"`
	Cert       string        `help:"PEM file with the certificate to show to the receiver."`
	Key        string        `help:"PEM file with its key."`
}

// Run delivers events until a signal, or until the receiver answers 410.
func (c deliverCmd) Run(ctx context.Context, e *env) error {
	o := app.ConsumeOptions{Group: c.Group, Streams: c.Stream, Ordered: c.Ordered}
	d := deliver.Options{To: c.To, SecretFile: c.SecretFile, Timeout: c.Timeout}
	return app.Deliver(ctx, e.config, o, d, tlsfile.Names{Cert: c.Cert, Key: c.Key, CA: c.CA}, e.config.Logger())
}

package replay

import (
	"context"

	"posthaste/internal/app"
	"posthaste/internal/cli"
)

// Run publishes history again, reports the progress on the standard error of o, and prints what it did. It goes on
// where the same replay stopped. The error is a usage error if the options contradict each other, and cli.ErrSaid if
// the result said already how far it came.
func Run(ctx context.Context, c app.Config, o cli.IO, options Options) error {
	r := &replaying{options: options, config: c, io: o}
	if err := r.parse(); err != nil {
		return cli.Usage(err.Error())
	}
	defer r.close()
	if err := r.open(ctx); err != nil {
		return cli.OneLine(err)
	}
	if options.DryRun {
		return cli.OneLine(r.dryRun(ctx))
	}
	return cli.OneLine(r.run(ctx))
}

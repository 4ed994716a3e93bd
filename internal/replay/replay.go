package replay

import (
	"context"

	"posthaste/internal/app"
	"posthaste/internal/cli"
)

// Run publishes history again, reports the progress on the standard error of o, and prints the result. It resumes a
// replay with the same options. It returns a usage error if the options contradict each other, and cli.ErrSaid if it
// has already reported its failure.
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

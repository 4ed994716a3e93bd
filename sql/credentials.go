package sql

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/secretfile"
)

// LoginRefused reports whether the server refuses the user or the password of a connection.
func LoginRefused(err error) bool {
	state := SQLState(err)
	return state == pgerrcode.InvalidPassword || state == pgerrcode.InvalidAuthorizationSpecification
}

// ConnectReplication connects with the parameters of cfg as they are, as a replication connection needs. It changes
// cfg.
func ConnectReplication(ctx context.Context, cfg *pgx.ConnConfig) (*pgconn.PgConn, error) {
	if err := readCredentials(cfg); err != nil {
		return nil, err
	}
	tracer, _ := cfg.Tracer.(pgx.ConnectTracer)
	c, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if tracer != nil {
		tracer.TraceConnectEnd(ctx, pgx.TraceConnectEndData{Err: err})
	}
	return c, err
}

// readCredentials reads the file of secrets that the URL of cfg names, if it names one. The file gives the password, or
// user and password, of the connection that cfg is for.
func readCredentials(cfg *pgx.ConnConfig) error {
	text, ok := cfg.RuntimeParams[secretfile.Parameter]
	if !ok {
		return nil
	}
	delete(cfg.RuntimeParams, secretfile.Parameter)
	file := secretfile.Parse(text)
	secret, err := file.Read()
	if err != nil {
		return err
	}
	if file.HasURL() {
		from, err := pgx.ParseConfig(secret)
		if err != nil {
			return fmt.Errorf("%s: %w", file.Setting, redact(err))
		}
		cfg.User, secret = from.User, from.Password
	}
	cfg.Password = secret
	tracers := []pgx.QueryTracer{refusals{file.Setting}}
	if cfg.Tracer != nil {
		tracers = append(tracers, cfg.Tracer)
	}
	cfg.Tracer = multitracer.New(tracers...)
	return nil
}

// refusals adds the setting to the error of a connection whose user or password is refused. pgx has no other place that
// sees the error of a pool before the pool's caller does, and the text of this error begins with the user and the
// database of its configuration.
type refusals struct{ setting string }

func (refusals) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	return ctx
}

func (r refusals) TraceConnectEnd(_ context.Context, data pgx.TraceConnectEndData) {
	if failed, ok := errors.AsType[*pgconn.ConnectError](data.Err); ok && LoginRefused(data.Err) {
		failed.Config = failed.Config.Copy()
		failed.Config.Database += ", " + r.setting + " is read again for each connection"
	}
}

func (refusals) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (refusals) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

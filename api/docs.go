package api

import (
	_ "embed"
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/swaggest/swgui/v5emb"
)

// openAPI is the document that the handlers are tested against.
//
//go:embed openapi.yaml
var openAPI []byte

// addDocs serves the OpenAPI document and a page that shows it. The page is embedded and works offline.
func addDocs(e *gin.Engine) {
	e.GET(routeOpenAPI, func(c *gin.Context) {
		c.Header("Cache-Control", "public, max-age=3600")
		write(c, http.StatusOK, "application/yaml", openAPI)
	})
	page := v5emb.New("posthaste", routeOpenAPI, routeDocs+"/")
	show := func(c *gin.Context) {
		// The page may use its own scripts and styles, including inline ones, and no foreign content.
		c.Header("Content-Security-Policy", "default-src 'none'; script-src 'self' 'unsafe-inline'; "+
			"style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'")
		page.ServeHTTP(c.Writer, c.Request)
	}
	e.GET(routeDocs, show)
	e.GET(routeDocs+"/*file", show)
}
